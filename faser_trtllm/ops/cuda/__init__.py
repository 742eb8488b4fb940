"""The CUDA kernels of plugins/cuda from Python: compiled by nvcc, loaded by the driver, launched on pointers.

`compiler` makes cubins and PTX, `module` loads and launches them; one module per stem has the checked launch and a
torch reference of the same signature. Nothing here is imported by the package itself.
"""
