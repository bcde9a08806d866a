"""The lab: both engines of a job side by side in one process, without services, to be measured.

May live here: what needs rollout, trainer and sync at once and is no part of a run: the pair of engines, the study
of trainer variants, tiny policies for tests, and what is measured on them. It sits above every service and may
import rollout, trainer, sync and what they stand on.

May not live here: anything that a service needs (services never import it), Redis, or a second version of what a
service does: sampling, batching, loss, conversion and signing are called where they live.
"""
