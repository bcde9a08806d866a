"""What runs in the server's own process, in SGLang's environment: `serve.py`, and nothing of syncline.

May live here: the start of the server, the watch on the process that started it, and named shims that are applied only
where there is no CUDA.

May not live here: anything that the service imports, a shim on a machine with CUDA, or one that invents numbers: a
missing kernel stays missing and fails when it is called.
"""
