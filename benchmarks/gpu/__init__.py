"""`faser bench gpu`: kernels, passes, partitions, exactness and policies on an NVIDIA GPU."""
