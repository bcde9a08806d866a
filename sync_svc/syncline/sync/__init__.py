"""The sync service: how a minted version becomes what each rollout worker holds.

May live here: conversion of a trainer's export to the contract's rollout representation, manifests, the pure
activation machine (`decide.py`), and the loop that joins them to the streams and the store.

May not live here: torch outside `lowbit.py` (loaded by jobs whose contract has families), engines, quantisers (they
are `numerics`), or knowledge of how a worker loads. Sync reads files as bytes and integers, so that without low-bit
weights it idles in a few tens of megabytes.
"""
