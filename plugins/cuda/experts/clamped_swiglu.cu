// Computes gpt-oss's activation of the gate and up outputs of pairs of a row and an expert, which are sorted by expert:
// (up + 1) * gate * sigmoid(1.702 * gate) of gate <= 7 and |up| <= 7, after adding the biases of the expert.
//
// A block takes 2048 columns of a pair. Memory bound: gate and up are read once and half as much is written. Speed: not
// measured.
//
// limits: registers <= 64, spill_bytes <= 0, shared_bytes <= 0
#include "common.cuh"
#include "rms.cuh"

namespace faser {

constexpr int kSwigluThreads = 256;
constexpr float kGateLimit = 7.0f, kGateAlpha = 1.702f;

// The expert of a pair: the first one that ends after it; num_experts for pairs of dummies.
__device__ inline int32_t expert_of(const int32_t* ends, int32_t num_experts, int32_t pair) {
  int32_t first = 0, last = num_experts;
  while (first < last) {
    const int32_t middle = (first + last) / 2;
    if (ends[middle] > pair) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  return first;
}

}  // namespace faser

// Grid (num_pairs, ceil(inner / 2048)), blocks of 256 threads. Inputs: gate_up [num_pairs, 2 * inner], the gates first;
// bias [num_experts, 2 * inner]; ends [num_experts]: the number of pairs up to and including an expert, ascending.
// Output: out [num_pairs, inner], not written after the last pair. inner is a multiple of 8, addresses of 16.
extern "C" __global__ void __launch_bounds__(faser::kSwigluThreads)
    clamped_swiglu(const faser::bf16* gate_up, const faser::bf16* bias, const int32_t* ends, int32_t num_pairs,
                   int32_t inner, int32_t num_experts, faser::bf16* out) {
  const int32_t pair = static_cast<int32_t>(blockIdx.x);
  const int32_t thread = static_cast<int32_t>(blockIdx.y) * faser::kSwigluThreads + static_cast<int32_t>(threadIdx.x);
  const int32_t column = thread * 8;
  if (pair >= num_pairs || column >= inner) return;
  const int32_t expert = faser::expert_of(ends, num_experts, pair);
  if (expert >= num_experts) return;
  const faser::bf16* row = gate_up + static_cast<int64_t>(pair) * 2 * inner + column;
  const faser::bf16* own_bias = bias + static_cast<int64_t>(expert) * 2 * inner + column;
  float gate[8], up[8], gate_bias[8], up_bias[8];
  faser::load_vector(row, gate);
  faser::load_vector(row + inner, up);
  faser::load_vector(own_bias, gate_bias);
  faser::load_vector(own_bias + inner, up_bias);
  alignas(16) faser::bf16 result[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float x = fminf(gate[i] + gate_bias[i], faser::kGateLimit);
    const float y = fminf(fmaxf(up[i] + up_bias[i], -faser::kGateLimit), faser::kGateLimit);
    result[i] = faser::from_float<faser::bf16>((y + 1.0f) * (x / (1.0f + expf(-faser::kGateAlpha * x))));
  }
  *reinterpret_cast<uint4*>(out + static_cast<int64_t>(pair) * inner + column) =
      *reinterpret_cast<const uint4*>(result);
}
