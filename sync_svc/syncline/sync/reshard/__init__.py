"""Shards of one engine's layout to full tensors, and full tensors to shards of another's.

May live here: copying the pieces that `contract/sharding` computes, checking shards against their stamps, and codes and
scales of low-bit weights cut together. Arrays are numpy's or torch's alike; the module that needs to know which is
`arrays.py`.

May not live here: knowledge of engines, names or axes (`contract/sharding`), torch at import, files, or quantisers.
"""
