// Sets the condition of a graph's conditional node from a number on the device. It is a file of its own, since the
// driver must provide cudaGraphSetConditional, and other cubins should load on drivers that lack it.
//
// limits: registers <= 32, spill_bytes <= 0, shared_bytes <= 0
#include <cstdint>

#include "common.cuh"

// Runs in one thread. value [1]; null sets nothing. handle: from cuGraphConditionalHandleCreate.
extern "C" __global__ void __launch_bounds__(1)
    set_conditional(const int32_t* value, cudaGraphConditionalHandle handle) {
  if (value != nullptr) cudaGraphSetConditional(handle, static_cast<unsigned>(*value));
}
