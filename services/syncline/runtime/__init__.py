"""What every service needs to live: bus, ledger, tracing, settings, leases, stores and the process frame.

May live here: the only importer of each outside system (`bus.py` redis, `tracing.py` opentelemetry,
`errands.py` celery), the ledger's atomic transitions, and mechanisms that more than one service runs
unchanged.

May not live here: torch, numpy outside `delta.py` (imported by those who use deltas alone), knowledge of what a
particular service does, decisions that belong to `contract/lag.py` or the scheduler's machine, or a catch-all for
exceptions outside `service.py`.
"""
