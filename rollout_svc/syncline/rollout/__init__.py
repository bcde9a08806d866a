"""The rollout service: takes work items, samples them, publishes trajectories, and keeps its version true.

May live here: the worker's loop and what it does between decode steps (taking work, obeying sync orders and
phases, folding chunks into trajectories), the `RolloutEngine` protocol, and engines under `engines/`.

May not live here: rewards, advantages, conversion of weights, decisions about lag (the ledger makes them),
or a version that the engine itself did not stamp.
"""
