"""An SGLang server as a rollout engine, spoken to over HTTP.

May live here: the launch plan and the life of one server process (`launch`), its HTTP interface as observed on 0.5.23
(`client`), version labels, spans and expert ids as it sends them (`labels`), the checkpoint folder of a manifest
(`checkpoint`), the checksums that a loaded version must read back with (`fused`), the wire form of tensor buckets
(`buckets`), adapters (`lora`), requests in flight (`flight`), and the engine that joins them (`engine`). Under `cpu/`:
what the server's own process runs first.

May not live here: `import sglang` (but for `cpu/`, which runs in the server's environment), Redis, tracing, the ledger,
or a version that the server did not attest.
"""
