"""The errands service: a Celery worker for work that may be retried. Today: scoring trajectories.

May live here: what an errand does (`loop.py`); how a job's reward source becomes a function that a sandbox can run
(`scorer.py`, a process of its own), and how a worker starts that process and asks it (`forker.py`); how an HTTP judge
is asked by the one process of its job (`judge*.py`, `backlog.py`, `breaker.py`), and what
keeps that process (`keeper.py`).

May not live here: celery itself (`runtime/errands.py` is its only importer), torch, the mechanics of the sandbox
(`runtime/sandbox.py`), or anything that carries a trajectory: an errand names one and reads it from its stream.
"""
