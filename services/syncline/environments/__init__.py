"""Environments: where prompts come from and how a response to one is judged.

May live here: the protocol (`environment.py`) and one file per adapter, each small enough to read at once.
An adapter is a pure function of `(options, seed, index)`: two processes that load the same task see the same
prompts.

May not live here: torch, redis, tokenizers, clocks, any knowledge of the services that call it, or a class
tower. An adapter's library is imported only when that adapter is loaded, so that naming a task costs nothing.
"""
