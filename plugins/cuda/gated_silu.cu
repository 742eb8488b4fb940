// Computes silu(gate) * up of a product of rows that were not normalized, after dividing it by the row's root mean
// square and adding the bias. gated_silu_e4m3 quantizes the result, for which it needs a row's largest number.
//
// A block takes 4096 columns of one row, in e4m3 a whole row, and sums the row's squares again, from cache. Memory
// bound: gate and up are read once and half as much is written, in e4m3 a quarter. Speed: not measured.
//
// limits: registers <= 112, spill_bytes <= 0, shared_bytes <= 192
#define FASER_BLOCK_THREADS 512
#include "block.cuh"
#include "common.cuh"
#include "rms.cuh"
#include "scaled_row.cuh"

namespace faser {

constexpr int kSiluThreads = kThreads;
constexpr int kSiluColumns = 8 * kSiluThreads;  // of a block at a time
constexpr int kSiluParts = 8;                   // of a row that one block holds

// Eight columns of blockIdx.x's row. scale: 1 / rms of the row.
template <typename T, typename Source>
__device__ inline void silu_times_up(const Source* gate_up, const T* bias, int32_t inner, int32_t column, float scale,
                                     T (&result)[8]) {
  const Source* row = gate_up + static_cast<int64_t>(blockIdx.x) * 2 * inner;
  float gate[8], up[8], gate_bias[8] = {}, up_bias[8] = {};
  load_vector(row + column, gate);
  load_vector(row + inner + column, up);
  if (bias != nullptr) {
    load_vector(bias + column, gate_bias);
    load_vector(bias + inner + column, up_bias);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float x = gate[i] * scale + gate_bias[i], y = up[i] * scale + up_bias[i];
    result[i] = from_float<T>(x / (1.0f + expf(-x)) * y);
  }
}

template <typename T, typename Source>
__device__ void gated_silu(const Source* gate_up, const T* hidden, const T* bias, int32_t inner, int32_t hidden_size,
                           float eps, T* out) {
  const int64_t row = blockIdx.x;
  const float scale = inverse_rms<kSiluThreads>(hidden + row * hidden_size, hidden_size, eps);
  const int32_t column = static_cast<int32_t>(blockIdx.y) * kSiluColumns + static_cast<int32_t>(threadIdx.x) * 8;
  if (column >= inner) return;
  alignas(16) T result[8];
  silu_times_up(gate_up, bias, inner, column, scale, result);
  *reinterpret_cast<uint4*>(out + row * inner + column) = *reinterpret_cast<const uint4*>(result);
}

// gated_silu in bf16, with the result quantized by one block per row.
__device__ inline void gated_silu_scaled(const bf16* gate_up, const bf16* hidden, const bf16* bias, int32_t inner,
                                         int32_t hidden_size, float eps, e4m3* values, float* scales) {
  const int64_t row = blockIdx.x;
  const float scale = inverse_rms<kSiluThreads>(hidden + row * hidden_size, hidden_size, eps);
  const int32_t first = static_cast<int32_t>(threadIdx.x) * 8;
  bf16 results[kSiluParts][8];
  uint64_t largest = 0;
#pragma unroll
  for (int part = 0; part < kSiluParts; part++) {
    const int32_t column = first + part * kSiluColumns;
    if (column < inner) {
      silu_times_up(gate_up, bias, inner, column, scale, results[part]);
      largest = Max()(largest, largest_bits(results[part]));
    }
  }
  const int32_t row_scale = scale_bits(static_cast<int32_t>(block_reduce(largest, Max())));
#pragma unroll
  for (int part = 0; part < kSiluParts; part++) {
    const int32_t column = first + part * kSiluColumns;
    if (column < inner) store_scaled(results[part], row_scale, values + row * inner + column);
  }
  if (threadIdx.x == 0) scales[row] = float_of_bits(row_scale);
}

}  // namespace faser

// Grid (num_rows, ceil(inner / 4096)), blocks of 512 threads. Inputs: gate_up [num_rows, 2 * inner] of SOURCE's type;
// hidden [num_rows, hidden_size], the rows that were multiplied; bias [2 * inner] or null. Output: out [num_rows,
// inner]. inner and hidden_size are multiples of 8, addresses of 16.
#define FASER_GATED_SILU(NAME, T, SOURCE)                                                              \
  extern "C" __global__ void __launch_bounds__(faser::kSiluThreads)                                    \
      NAME(const SOURCE* gate_up, const T* hidden, const T* bias, int32_t num_rows, int32_t inner,     \
           int32_t hidden_size, int32_t eps_bits, T* out) {                                            \
    if (static_cast<int32_t>(blockIdx.x) >= num_rows) return;                                          \
    faser::gated_silu(gate_up, hidden, bias, inner, hidden_size, faser::float_of_bits(eps_bits), out); \
  }
FASER_GATED_SILU(gated_silu_bf16, faser::bf16, faser::bf16)
FASER_GATED_SILU(gated_silu_fp16, faser::fp16, float)

// Grid (num_rows), blocks of 512 threads; inner at most 8 * 4096. Outputs: values [num_rows, inner], scales [num_rows].
extern "C" __global__ void __launch_bounds__(faser::kSiluThreads)
    gated_silu_e4m3(const faser::bf16* gate_up, const faser::bf16* hidden, const faser::bf16* bias, int32_t num_rows,
                    int32_t inner, int32_t hidden_size, int32_t eps_bits, faser::e4m3* values, float* scales) {
  if (static_cast<int32_t>(blockIdx.x) >= num_rows || inner > faser::kSiluParts * faser::kSiluColumns) return;
  faser::gated_silu_scaled(gate_up, hidden, bias, inner, hidden_size, faser::float_of_bits(eps_bits), values, scales);
}
