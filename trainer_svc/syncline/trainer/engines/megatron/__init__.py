"""The trainer engine on megatron-core, used as a library: one model cut over the ranks of one process group.

May live here: what builds, fills, runs, steps and stores one rank's part of a model (`rank_model.py` and what it
calls), the process group and its command loop (`ranks.py`, `seat.py`, `follower.py`, `wire.py`), rank 0's
`TrainerEngine` (`engine.py`), and the stand-ins that megatron-core needs where there is no CUDA (`shims.py`, and
nowhere else).

May not live here: rules of how tensors are cut (`contract/sharding` has them, for sync as well), losses, Redis, phases.
megatron-core is imported by `library.py` and `shims.py` alone, and only once a job has chosen the engine.
"""
