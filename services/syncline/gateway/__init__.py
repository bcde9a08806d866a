"""The gateway: the REST door of an installation. Jobs go in; jobs, versions and each token's path come out.

May live here: FastAPI routes (one file per idea), the door itself (limits, token), answers and errors as
people see them, lineage put together from records (`lineage.py`), and the report of a job.

May not live here: decisions about a running job (the scheduler's), writes into a job beyond its submission
and its requests, torch, or a name that a user wrote and that becomes a path. The gateway holds no state of
its own: kill it at any moment and start another. What it caches on disk can be deleted at any time.
"""
