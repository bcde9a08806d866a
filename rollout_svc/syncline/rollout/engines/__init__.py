"""Rollout engines, one module or folder each, chosen by one `match` in `rollout/__main__.py`.

May live here: what runs a model forward, holds its weights and its requests' state, and says which version
made each token. An engine passes `tests/conformance/rollout_engine.py`.

May not live here: Redis, tracing, the ledger, or any notion of reward.
"""
