"""Launchers: they make the processes that run equal to the placement that is wanted.

May live here: the protocol (`launcher.py`) and one file per kind of launcher. A launcher is level-triggered:
it is told the whole placement each time, and telling it twice changes nothing.

May not live here: what a placement should be, Redis, phases, jobs. A launcher knows processes and no more.
"""
