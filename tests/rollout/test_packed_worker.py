"""A worker under a low-bit contract: verified on wide context, and the ack says what its modules hold."""

from __future__ import annotations

from pathlib import Path

from conformance.forge import cold_logprobs, gap
from worker_world import world

from syncline.contract.precision_trace import ComponentTrace


def test_canaries_test_weights_and_the_ack_says_what_they_are(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    """INT4 weights beside an E4M3 context, which would set the scores of the canaries apart by far more."""
    custom = {
        "name": "int4_with_e4m3_context",
        "families": [{"name": "linear", "match": ["model.layers.*_proj.weight"], "weight": "int4_g32"}],
        "rollout": {"kv_cache": "fp8_e4m3"},
        "trainer": {"fprop": {"right": "reconstructed"}, "dgrad": {"right": "reconstructed"}},
    }
    with world(redis_url, job, tmp_path, precision={"custom": custom}) as w:
        wanted = w.submit(1)
        w.start()
        w.phase()
        w.joined()
        verified = w.ack("verified", w.order("stage", 0))
        assert verified.canary_gap is not None
        assert verified.canary_gap < 1e-5
        w.ack("active", w.order("commit", 0))
        records = w.wait_published(wanted)
        apart = []
        for record in records.values():
            first = record.segments[0].end
            apart.append(gap(record.logprobs, cold_logprobs(w.forge.cold(0), list(record.tokens), first)))
        assert max(apart) > 1e-4, "the context of requests is not wide"
        trace = verified.trace
        assert isinstance(trace, ComponentTrace)
        uses = {use.family: use for use in trace.uses}
        assert uses["linear"].encoded == "INT4, FP32 scale per 1x32"
        assert uses["linear"].kernel == "wide"
        assert uses["linear"].operands == "X original, W reconstructed 1x32"
        layers, heads, width = 2, 2, 16
        assert trace.bytes["kv_cache"] == layers * 2 * heads * (width + 4)
        assert trace.bytes["codes"] == sum(
            t.nbytes for t in w.forge.manifest(0).tensors if t.name.endswith("_packed")
        )
