"""The CUDA kernels of plugins/cuda from Python: compiled by nvcc, loaded by the driver, launched on pointers.

`compiler` makes cubins and PTX, `driver` loads and launches them; each stem has one module with its checked launch, and
most have a reference of the same signature in lab/reference/cuda. The package itself imports none of this.
"""
