// Writes the results of a block.
#ifndef FASER_CUDA_ATTENTION_RESULT_CUH_
#define FASER_CUDA_ATTENTION_RESULT_CUH_

#include "../common.cuh"
#include "work.cuh"

namespace faser {

// Writes results of (row, head) to `out`, T [num_rows, num_heads, head_dim], or to a chunk's slots of the workspace.
template <typename T, int kHeadDim>
struct ResultWriter {
  const AttentionArguments& args;
  int slot_of_row0, slots_per_row;  // slots_per_row 0: not split

  __device__ int64_t item(int row, int head) const {
    return static_cast<int64_t>(slots_per_row > 0 ? slot_of_row0 + row * slots_per_row : row) * args.num_heads + head;
  }
  __device__ void pair(int row, int head, int column, float low, float high) const {
    const int64_t at = item(row, head) * kHeadDim + column;
    if (slots_per_row > 0) {
      *reinterpret_cast<float2*>(args.workspace + at) = make_float2(low, high);
    } else {
      *reinterpret_cast<uint32_t*>(static_cast<T*>(args.out) + at) = pack2<T>(low, high);
    }
  }
  // log2 of the sum of exponentials; -inf: nothing was visible.
  __device__ void log2_sum(int row, int head, float value) const {
    if (slots_per_row == 0) return;
    args.workspace[static_cast<int64_t>(args.max_slots) * args.num_heads * kHeadDim + item(row, head)] = value;
  }
};

// Zeroes the rows after the last request's, which are dummies of a bucket and must be readable for later ops.
template <typename T, typename Tiles>
__device__ void fill_rows_of_nobody(const AttentionArguments& args) {
  const int first = args.batch_size > 0 ? clamp(args.cu_q_lens[args.batch_size], 0, args.num_rows) : 0;
  const int group = args.group(), num_items = (args.num_rows - first) * group;
  const ResultWriter<T, Tiles::kHeadDim> writer{args, 0, 0};
  for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
    const int row = first + item / group, head = static_cast<int>(blockIdx.y) * group + item % group;
    for (int column = 2 * threadIdx.x; column < Tiles::kHeadDim; column += 2 * Tiles::kNumThreads) {
      writer.pair(row, head, column, 0.0f, 0.0f);
    }
  }
}

}  // namespace faser

#endif  // FASER_CUDA_ATTENTION_RESULT_CUH_
