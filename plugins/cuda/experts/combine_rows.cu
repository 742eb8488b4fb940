// Adds to each row the weighted outputs of its experts, with their biases, in ascending order of the experts, and then
// the output of a shared expert times the sigmoid of its gate. Sums are in fp32 and rounded once.
//
// A block takes 1024 columns of a row. Memory bound: each output is read once. Speed: not measured.
//
// limits: registers <= 64, spill_bytes <= 0, shared_bytes <= 0
#include "common.cuh"
#include "rms.cuh"

namespace faser {

constexpr int kCombineThreads = 128;

// bias: of the source's columns, or null.
__device__ inline void add_weighted(const bf16* source, const bf16* bias, float weight, float (&sums)[8]) {
  float values[8], biases[8] = {};
  load_vector(source, values);
  if (bias != nullptr) load_vector(bias, biases);
#pragma unroll
  for (int i = 0; i < 8; i++) sums[i] += weight * (values[i] + biases[i]);
}

}  // namespace faser

// Grid (num_rows, ceil(width / 1024)), blocks of 128 threads. outputs [num_pairs, width]; weights, places [num_rows,
// top_k]: of a row's pairs, in ascending order of the expert; shared [num_rows, width] or null; gates [num_rows,
// num_gates]: the last of a row is that of shared; bias [num_experts, width] of the experts [num_rows, top_k], or null;
// num_used [1]: rows before the dummies. Adds to hidden [num_rows, width]. width is a multiple of 8, addresses of 16.
extern "C" __global__ void __launch_bounds__(faser::kCombineThreads)
    combine_rows(const faser::bf16* outputs, const float* weights, const int32_t* places, const faser::bf16* shared,
                 const float* gates, const faser::bf16* bias, const int32_t* experts, const int32_t* num_used,
                 int32_t num_rows, int32_t num_pairs, int32_t top_k, int32_t width, int32_t num_gates,
                 int32_t num_experts, faser::bf16* hidden) {
  const int64_t row = blockIdx.x;
  const int32_t thread = static_cast<int32_t>(blockIdx.y) * faser::kCombineThreads + static_cast<int32_t>(threadIdx.x);
  const int32_t column = thread * 8;
  if (row >= faser::clamp(*num_used, 0, num_rows) || column >= width) return;
  float sums[8] = {};
  for (int32_t j = 0; j < top_k; j++) {
    const int32_t pair = places[row * top_k + j], expert = faser::clamp(experts[row * top_k + j], 0, num_experts - 1);
    if (pair < 0 || pair >= num_pairs) continue;
    const faser::bf16* own_bias = bias == nullptr ? nullptr : bias + static_cast<int64_t>(expert) * width + column;
    const faser::bf16* output = outputs + static_cast<int64_t>(pair) * width + column;
    faser::add_weighted(output, own_bias, weights[row * top_k + j], sums);
  }
  if (shared != nullptr) {
    const float gate = gates[row * num_gates + num_gates - 1];
    faser::add_weighted(shared + row * width + column, nullptr, 1.0f / (1.0f + expf(-gate)), sums);
  }
  alignas(16) faser::bf16 result[8];
  float before[8];
  faser::load_vector(hidden + row * width + column, before);
#pragma unroll
  for (int i = 0; i < 8; i++) result[i] = faser::from_float<faser::bf16>(before[i] + sums[i]);
  *reinterpret_cast<uint4*>(hidden + row * width + column) = *reinterpret_cast<const uint4*>(result);
}
