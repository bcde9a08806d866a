"""The launcher of pods: it makes a job's objects in one namespace equal to the placement that is wanted.

May live here: how a placement becomes objects (`plan.py`, `template.py`, `manifests.py`) and how objects become what
runs (`seen.py`), both pure; the API server's door (`api.py`, the only importer of the client), the copy that is kept of
what is there (`mirror.py`), what entries of pods say (`inside.py`), the leader's lease (`leader.py`), and the launcher
that joins them (`launcher.py`).

May not live here: what a placement should be, Redis, phases, anything outside the namespace, rights over nodes.
"""
