"""The scheduler: decides which engines of a job are awake, feeds them work, and keeps their processes alive.

May live here: the pure machine (`machine.py`), pure decisions (`policy.py`, `placement.py`), the service
that performs what they decide (`loop.py` and the files it is split into), launchers (`launch/`), and the
command line with its supervisor (`cli.py`, `supervisor.py`).

May not live here: torch or any engine, prompts, rewards or weights, and imports of another service. The pure
files import the contract and the standard library alone: no clock, no I/O, no randomness.
"""
