"""How a model's full tensors lie on the ranks of a trainer or a rollout engine, as data.

May live here: grids of ranks, the tables that say for each engine which full tensors a rank's parameter is made of and
how their axes are cut, and the pure functions that turn a table into pieces (integers and names).

May not live here: arrays, bytes, files, or anything that copies: `sync/reshard` carries pieces out.
"""
