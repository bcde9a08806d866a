"""Trainer engines, one file each, chosen by one `match` in `engine.py`.

May live here: what a training framework needs to satisfy `engine.TrainerEngine`. May not live here: Redis,
the ledger, files of the run folder other than those that the protocol hands over. Every engine passes
`tests/conformance/trainer_engine.py`.
"""
