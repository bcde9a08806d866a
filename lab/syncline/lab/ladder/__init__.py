"""The validation ladder (seed section 6, Table 6): nine levels that say at which boundary two policies part.

May live here: one file per level, what they stand on (`subject.py`, `oracle.py`), the climb and the diagnosis. Each
level holds more of the loop fixed than the next, so that the first one that fails names the boundary. The classes under
test are those of the services; what they are compared with is written anew here, from the definitions, and shares no
code with them.

May not live here: anything that a service needs, defects (tests switch those on from outside), or a figure without
the source of its bound.
"""
