"""What low-bit numbers are: quantisers, packers, their inverses, and measures of what they cost.

May live here: pure torch functions of tensors, one file per format, and the GEMMs of a low-bit linear layer, driven by
the schemes of `contract/schemes.py`. One implementation serves trainer, converter, verifier and engine.
`kernels.py` alone imports numba: there the work of `blockwise.py` stands once more for CPU tensors, held to the same
bytes by tests.

May not live here: I/O, models, processes, defaults of a rule that a scheme does not name, or a second way to do
what one function does.
"""
