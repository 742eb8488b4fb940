// Distributes the work over blocks: a request's rows are cut into tiles and, if its context is long, its positions into
// chunks.
//
// Chunks begin at multiples of split_tokens, so the number of blocks that share a long context follows from its length
// alone, and a row's sums do not depend on the batch. A slot of the workspace holds a chunk's partial result of a row.
// Slots are assigned in the order of requests, and a request is not split if too few are left.
#ifndef FASER_CUDA_ATTENTION_WORK_CUH_
#define FASER_CUDA_ATTENTION_WORK_CUH_

#include "../common.cuh"

namespace faser {

// Limit on rows times query heads per KV head of a request that is split; the tiles of larger ones fill the device.
constexpr int kMaxSplitRows = 256;

// split_tokens: positions of a chunk, a multiple of 64. max_slots: of the workspace, which holds float partial results
// [max_slots, num_heads, head_dim] and after them log2 sums [max_slots, num_heads]; 0: nothing is split. window: the
// kernels' argument.
struct AttentionArguments {
  const void* q;
  const void* k_cache;
  const void* v_cache;
  const int32_t* block_table;
  const int32_t* cu_q_lens;
  const int32_t* kv_lens;
  int num_rows, batch_size, num_heads, num_kv_heads, num_blocks, tokens_per_block, max_blocks_per_seq, window;
  int split_tokens, max_slots;
  float scale, v_scale;
  void* out;
  float* workspace;

  __device__ int group() const { return num_heads / num_kv_heads; }
  __device__ bool is_causal() const { return window >= -1; }
  // Positions that a row sees up to its own; 0: all, below 0: all but the first.
  __device__ int span() const { return window >= -2 - window ? window : -2 - window; }
};

// The positions that a request's rows see: row i up to past + i, or up to the last row's, within [kv_begin, kv_end).
struct Context {
  int past, kv_begin, kv_end;

  __device__ Context(const AttentionArguments& args, int request, int num_rows) {
    const int64_t table_tokens = static_cast<int64_t>(args.max_blocks_per_seq) * args.tokens_per_block;
    const int capacity = static_cast<int>(table_tokens < kMaxPositions ? table_tokens : kMaxPositions);
    past = clamp(args.kv_lens[request], 0, kMaxPositions) - num_rows;
    kv_end = clamp(past + num_rows, 0, capacity);
    kv_begin = args.span() > 0 ? clamp(past + 1 - args.span(), 0, kv_end) : 0;
  }
  __device__ int first_chunk(int split_tokens) const { return kv_begin / split_tokens; }
  __device__ int num_chunks(int split_tokens) const {
    return ceil_div(kv_end, split_tokens) - first_chunk(split_tokens);
  }
};

// An item of a request, which has the rows [first_row, first_row + num_rows). first_slot: that of its partial results,
// -1 if it is not split. item: the index among its items. request < 0: none.
struct Work {
  int request, first_row, num_rows, first_slot, item;
};

__device__ inline int warp_inclusive_sum(int value) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int other = __shfl_up_sync(kFullMask, value, offset);
    if (lane >= offset) value += other;
  }
  return value;
}

// Finds an item; a whole warp must call it. Items are in the order of requests, and each is a tile of tile_rows packed
// rows, or such a tile of a chunk. kByRow: `wanted` is a row, and the returned item is meaningless.
template <bool kByRow>
__device__ Work find_work(const AttentionArguments& args, int tile_rows, int wanted) {
  const int lane = threadIdx.x % kWarpSize, group = args.group();
  int slots_before = 0;
  for (int base = 0; base < args.batch_size; base += kWarpSize) {
    const int b = base + lane;
    int begin = 0, count = 0, chunks = 1;
    if (b < args.batch_size) {
      begin = clamp(args.cu_q_lens[b], 0, args.num_rows);
      count = clamp(args.cu_q_lens[b + 1], begin, args.num_rows) - begin;
      if (args.max_slots > 0 && count > 0 && count <= kMaxSplitRows / group) {
        chunks = Context(args, b, count).num_chunks(args.split_tokens);
      }
    }
    // Larger numbers are cut to one too many, which does not overflow.
    const int slots = chunks <= 1 ? 0 : (chunks <= args.max_slots / count ? count * chunks : args.max_slots + 1);
    const int slots_end = slots_before + warp_inclusive_sum(slots);
    const bool is_split = slots > 0 && slots_end <= args.max_slots;
    const int items = ceil_div(count * group, tile_rows) * (is_split ? chunks : 1);
    const int end = warp_inclusive_sum(items);
    const unsigned found = __ballot_sync(kFullMask, kByRow ? wanted >= begin && wanted < begin + count : wanted < end);
    if (found != 0) {
      const int owner = __ffs(found) - 1;
      return {base + owner, __shfl_sync(kFullMask, begin, owner), __shfl_sync(kFullMask, count, owner),
              __shfl_sync(kFullMask, is_split ? slots_end - slots : -1, owner),
              wanted - __shfl_sync(kFullMask, end - items, owner)};
    }
    if (!kByRow) wanted -= __shfl_sync(kFullMask, end, kWarpSize - 1);
    slots_before = clamp(__shfl_sync(kFullMask, slots_end, kWarpSize - 1), 0, args.max_slots + 1);
  }
  return {-1, 0, 0, -1, 0};
}

}  // namespace faser

#endif  // FASER_CUDA_ATTENTION_WORK_CUH_
