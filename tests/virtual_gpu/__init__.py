"""A GPU that is not there: one stand-in device for all tests of the GPU path.

driver: libcuda.so.1 in C++ (device/driver), called through cuda-python's own bindings: contexts, green contexts,
  streams, events, graphs, memory, modules.
streams: lazy. Work runs on the thread that waits for it, one item at a time, in a random order (by a seed) that streams
  and events allow. Capturing refuses what CUDA refuses: waiting, allocating, copies of memory that is not page-locked.
  A stream is refused once its green context is destroyed, and so are graphs that were captured there; freeing torch's
  page-locked memory that such a stream has copied aborts the process, as it did on an H100.
memory: the host's, with borders; poisoned when it is new and when it is freed. Kernels and copies that leave it end
  with an error that says who did. Graphs of an engine share a pool, as torch's do, so that pairs take as much as there.
kernels: the .cu files themselves over the emulator, launched by cuLaunchKernel with the engine's own arguments.
torch: a device of torch ("virtual"): each operation is torch's for the CPU, as a host function in stream order. Matrix
  products sum in float64, so that a row does not depend on the batch.
TensorRT: plans are interpreted, plugins included (device/tensorrt.py); no real TensorRT takes these engines.
time: the host's. A cost table that is measured here says what the stand-in costs, not what a GPU does.

What it cannot show: speed; work that runs at the same time; a GPU's own sums and instructions; the code of CUDA and
torch.cuda (CudaRuntime is replaced by VirtualRuntime).

`python -m tests.virtual_gpu faser COMMAND ...` runs a command on it: build, check, generate, profile, serve.
VIRTUAL_GPU_SEED chooses the order of work, VIRTUAL_GPU_MEMORY_MIB the device's memory (1024). VIRTUAL_GPU_FAILS, such
as cuGraphLaunch:6 or cuMemAllocAsync:30, makes one call fail: a launch for good, as the device's failures are.
"""
