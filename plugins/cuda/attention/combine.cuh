// Combines the partial results of a row's chunks.
#ifndef FASER_CUDA_ATTENTION_COMBINE_CUH_
#define FASER_CUDA_ATTENTION_COMBINE_CUH_

#include "../common.cuh"
#include "work.cuh"

namespace faser {

// Combines the chunks of row blockIdx.x with one warp per head. Rows that are not split are copied from `whole`, unless
// that is `out`.
template <typename T>
__device__ void combine(const AttentionArguments& args, const T* whole, int head_dim, T* out) {
  const int row = blockIdx.x, lane = threadIdx.x % kWarpSize;
  const int head = static_cast<int>(blockIdx.y * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize);
  if (head >= args.num_heads) return;
  const Work mine = find_work<true>(args, 16, row);
  const int64_t at = (static_cast<int64_t>(row) * args.num_heads + head) * head_dim;
  if (mine.first_slot < 0) {
    if (whole == out) return;
    for (int column = 2 * lane; column < head_dim; column += 2 * kWarpSize) {
      *reinterpret_cast<uint32_t*>(out + at + column) = *reinterpret_cast<const uint32_t*>(whole + at + column);
    }
    return;
  }
  const int num_chunks = Context(args, mine.request, mine.num_rows).num_chunks(args.split_tokens);
  const int64_t first =
      static_cast<int64_t>(mine.first_slot + (row - mine.first_row) * num_chunks) * args.num_heads + head;
  const float* log2_sums = args.workspace + static_cast<int64_t>(args.max_slots) * args.num_heads * head_dim + first;
  const float* partial = args.workspace + first * head_dim;
  float highest = -INFINITY, total = 0.0f;
  for (int c = lane; c < num_chunks; c += kWarpSize) highest = fmaxf(highest, log2_sums[c * args.num_heads]);
  highest = warp_max(highest);
  for (int c = lane; c < num_chunks && highest > -INFINITY; c += kWarpSize) {
    total += exp2_approx(log2_sums[c * args.num_heads] - highest);
  }
  total = warp_sum(total);
  const float normalise = total > 0.0f ? 1.0f / total : 0.0f;
  const float shift = highest > -INFINITY ? highest : 0.0f;  // so that chunks that are not visible weigh 0
  for (int column = 2 * lane; column < head_dim; column += 2 * kWarpSize) {
    float low = 0.0f, high = 0.0f;
    // No branch, so that the loads of several chunks are in flight.
#pragma unroll 8
    for (int c = 0; c < num_chunks; c++) {
      const float weight = exp2_approx(log2_sums[c * args.num_heads] - shift);
      const int64_t slot = static_cast<int64_t>(c) * args.num_heads * head_dim;
      const float2 pair = *reinterpret_cast<const float2*>(partial + slot + column);
      low += pair.x * weight;
      high += pair.y * weight;
    }
    *reinterpret_cast<uint32_t*>(out + at + column) = pack2<T>(low * normalise, high * normalise);
  }
}

}  // namespace faser

#endif  // FASER_CUDA_ATTENTION_COMBINE_CUH_
