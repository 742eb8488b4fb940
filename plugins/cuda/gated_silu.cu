// silu(gate) * up of a product of rows that were not normalised: it is divided by the root mean square of the row, and
// the bias is added, before.
//
// A block takes 4096 columns of one row, and sums the row's squares again, from cache. Memory bound: gate and up are
// read once and half as much is written. Speed: not measured.
//
// limits: registers <= 64, spill_bytes <= 0, shared_bytes <= 64
#include "common.cuh"
#include "rms.cuh"

namespace faser {

constexpr int kSiluThreads = 512;
constexpr int kSiluColumns = 8 * kSiluThreads;  // of a block

template <typename T, typename Source>
__device__ void gated_silu(const Source* gate_up, const T* hidden, const T* bias, int32_t inner, int32_t hidden_size,
                           float eps, T* out) {
  const int64_t row = blockIdx.x;
  const float scale = inverse_rms<kSiluThreads>(hidden + row * hidden_size, hidden_size, eps);
  const int32_t column = static_cast<int32_t>(blockIdx.y) * kSiluColumns + static_cast<int32_t>(threadIdx.x) * 8;
  if (column >= inner) return;
  float gate[8], up[8], gate_bias[8] = {}, up_bias[8] = {};
  load_vector(gate_up + row * 2 * inner + column, gate);
  load_vector(gate_up + row * 2 * inner + inner + column, up);
  if (bias != nullptr) {
    load_vector(bias + column, gate_bias);
    load_vector(bias + inner + column, up_bias);
  }
  alignas(16) T result[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float x = gate[i] * scale + gate_bias[i], y = up[i] * scale + up_bias[i];
    result[i] = from_float<T>(x / (1.0f + expf(-x)) * y);
  }
  *reinterpret_cast<uint4*>(out + row * inner + column) = *reinterpret_cast<const uint4*>(result);
}

}  // namespace faser

// Grid (num_rows, ceil(inner / 4096)), blocks of 512 threads. gate_up [num_rows, 2 * inner] of SOURCE's type; hidden
// [num_rows, hidden_size], the rows that were multiplied; bias [2 * inner] or null -> out [num_rows, inner]. inner and
// hidden_size are multiples of 8, addresses of 16.
#define FASER_GATED_SILU(NAME, T, SOURCE)                                                              \
  extern "C" __global__ void __launch_bounds__(faser::kSiluThreads)                                    \
      NAME(const SOURCE* gate_up, const T* hidden, const T* bias, int32_t num_rows, int32_t inner,     \
           int32_t hidden_size, int32_t eps_bits, T* out) {                                            \
    if (static_cast<int32_t>(blockIdx.x) >= num_rows) return;                                          \
    faser::gated_silu(gate_up, hidden, bias, inner, hidden_size, faser::float_of_bits(eps_bits), out); \
  }
FASER_GATED_SILU(gated_silu_bf16, faser::bf16, faser::bf16)
FASER_GATED_SILU(gated_silu_fp16, faser::fp16, float)
