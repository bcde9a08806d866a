"""From a version, or a checkpoint, to a folder that `transformers`, PEFT readers or SGLang load; see docs/export.md.

One export is one process (`python -m syncline.exporting JOB NAME`), which the gateway starts and which ends with it:
it may need torch and much memory, and the gateway neither.

    held.py        which versions and checkpoints of a job could be exported; no torch
    source.py      `Source`: facts of all tensors, then their bytes one after another; from the store
    masters.py     the same from a trainer's checkpoint
    decoded.py     the same of low-bit weights, dequantised
    files.py       tensors into safetensors shards with their index, each read back by digest
    settings.py    config.json, generation config, tokenizer, quantization config, adapter config
    card.py        README.md
    export.py      all of it, into a folder that appears whole or not at all

May live here: whatever reads what a job left behind and writes it in somebody else's layout, and the words that say
what was written. torch is imported by `masters.py` and `decoded.py` alone, where a request needs them.

May not live here: quantisation (that is `numerics`), conversion of a new version (sync), anything that changes a job,
or a claim in the card that no record states. Nothing is exported whose signature, digest or plan does not hold.
"""
