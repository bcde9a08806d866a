"""The contract: what the services say to one another, and nothing else.

May live here: message shapes (msgspec), the job spec (pydantic), the two paths with their hops, the names of
all Redis keys, and pure decisions that more than one service must agree on (`lag.py`).

May not live here: I/O of any kind, torch, numpy, redis, clocks, randomness, or knowledge of how a service works.
A module here imports the standard library, pydantic and msgspec alone.
"""
