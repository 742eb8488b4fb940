// Partial results of a row: how chunks are merged, and where results go.
#ifndef FASER_CUDA_ATTENTION_RESULT_CUH_
#define FASER_CUDA_ATTENTION_RESULT_CUH_

#include "../common.cuh"
#include "work.cuh"

namespace faser {

constexpr float kLog2E = 1.4426950408889634f;

// Of a row and head over some positions: the largest score as a power of two (-inf: none is visible), and the sum of
// exponentials relative to that. The sums of V are relative to it as well.
struct alignas(8) Partial {
  float top, sum;
};

// Two partial results as one. The operations are spelled out, so that a row has the same bits wherever they are merged.
struct Merge {
  Partial both;
  float first, second;  // the weights of the two

  __device__ explicit Merge(Partial only) : both(only), first(0.0f), second(1.0f) {}
  __device__ Merge(Partial a, Partial b) {
    both.top = fmaxf(a.top, b.top);
    const float shift = both.top == -INFINITY ? 0.0f : both.top;  // so that what is not visible weighs 0
    first = exp2_approx(a.top - shift);
    second = exp2_approx(b.top - shift);
    both.sum = of(a.sum, b.sum);
  }
  __device__ float of(float a, float b) const { return fmaf(a, first, b * second); }
};

__device__ inline Partial* partials_of(const AttentionArguments& args, int head_dim) {
  return reinterpret_cast<Partial*>(args.workspace + static_cast<int64_t>(args.max_slots) * args.num_heads * head_dim);
}

__device__ inline float normalization(const AttentionArguments& args, Partial whole, int head) {
  if (whole.sum == 0.0f) return 0.0f;
  if (args.sinks == nullptr) return args.v_scale / whole.sum;
  return args.v_scale / (whole.sum + exp2_approx(args.sinks[head] * kLog2E - whole.top));
}

// What becomes of a chunk's result of a row: nothing if the row has no such chunk. It is merged with what is in the
// slot if that holds the chunks before, and is written there unless the row is whole.
struct RowPlan {
  bool exists, is_merged, is_whole;
  int row, head;
  int64_t slot;

  __device__ int64_t in_slots(const AttentionArguments& args) const { return slot * args.num_heads + head; }
};

// Writes a result of a row and head, column by column.
template <typename T, int kHeadDim>
struct ResultWriter {
  const RowPlan& plan;
  const Merge& merge;
  T* out;
  float* sums;
  float normalize;

  __device__ ResultWriter(const AttentionArguments& args, const RowPlan& plan, const Merge& merge)
      : plan(plan),
        merge(merge),
        out(static_cast<T*>(args.out) + (static_cast<int64_t>(plan.row) * args.num_heads + plan.head) * kHeadDim),
        sums(args.workspace + plan.in_slots(args) * kHeadDim),
        normalize(normalization(args, merge.both, plan.head)) {}

  __device__ void pair(int column, float low, float high) const {
    if (plan.is_merged) {
      const float2 before = *reinterpret_cast<const float2*>(sums + column);
      low = merge.of(before.x, low);
      high = merge.of(before.y, high);
    }
    if (plan.is_whole) {
      *reinterpret_cast<uint32_t*>(out + column) = pack2<T>(low * normalize, high * normalize);
    } else {
      *reinterpret_cast<float2*>(sums + column) = make_float2(low, high);
    }
  }
};

// Zeroes the rows after the last request's, which are dummies of a bucket and must be readable for later ops.
template <typename T, typename Tiles>
__device__ void fill_rows_of_nobody(const AttentionArguments& args) {
  const int first = args.batch_size > 0 ? clamp(args.cu_q_lens[args.batch_size], 0, args.num_rows) : 0;
  const int group = args.group(), num_items = (args.num_rows - first) * group;
  for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
    const int row = first + item / group, head = static_cast<int>(blockIdx.y) * group + item % group;
    T* out = static_cast<T*>(args.out) + (static_cast<int64_t>(row) * args.num_heads + head) * Tiles::kHeadDim;
    for (int column = 2 * threadIdx.x; column < Tiles::kHeadDim; column += 2 * Tiles::kNumThreads) {
      *reinterpret_cast<uint32_t*>(out + column) = pack2<T>(0.0f, 0.0f);
    }
  }
}

}  // namespace faser

#endif  // FASER_CUDA_ATTENTION_RESULT_CUH_
