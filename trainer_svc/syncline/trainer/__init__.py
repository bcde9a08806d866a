"""The trainer service: from claimed groups to a new version of the weights.

May live here: the loop (`loop.py` with `intake.py`, `minting.py`, `resume.py`), checkpoints, the engine
protocol and its engines (`engine.py`, `engines/`), and the arithmetic of an update as pure functions
(`advantage.py`, `loss.py`, `corrections.py`, `batch.py`).

May not live here: sampling, conversion to a rollout representation, decisions about phases and modes (the
scheduler makes them, the trainer obeys), and Parquet (`runtime/segments.py`, which the gateway reads too).
"""
