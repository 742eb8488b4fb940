// Distributes the work over blocks: a request's rows are cut into tiles and, if its context is long, its positions into
// chunks.
//
// A chunk's partial result (Partial) is the unit of arithmetic: a row's are merged in the order of their positions, by
// the same operations in registers, in the last block of a tile and in verify_attention_combine. Chunks begin at
// multiples of split_tokens, and a last chunk shorter than half of that belongs to the one before. Both follow from the
// row's position alone, so a row's sums depend neither on its batch nor on who computes them.
//
// A slot of the workspace holds a partial result of a row. Every row has one, and those of requests that several blocks
// share have one more for each further chunk. These are assigned in the order of requests; where too few are left, a
// block walks over all chunks of a tile, and merges them in the rows' own slots.
#ifndef FASER_CUDA_ATTENTION_WORK_CUH_
#define FASER_CUDA_ATTENTION_WORK_CUH_

#include "../common.cuh"

namespace faser {

// Limit on rows times query heads per KV head of a request that is split; the tiles of larger ones fill the device.
constexpr int kMaxSplitRows = 256;

// split_tokens: positions of a chunk, a power of two, at least 64. max_slots: of the workspace, num_rows at least, or
// 0: every context is a single chunk. The workspace holds float sums [max_slots, num_heads, head_dim] and after them
// Partial [max_slots, num_heads]. in_place: the last block of a tile merges its chunks. window: the kernels' argument.
// sinks: [num_heads], a further score of each head's softmax, whose share is dropped; or null.
struct AttentionArguments {
  const void* q;
  const void* k_cache;
  const void* v_cache;
  const int32_t* block_table;
  const int32_t* cu_q_lens;
  const int32_t* kv_lens;
  int num_rows, batch_size, num_heads, num_kv_heads, num_blocks, tokens_per_block, max_blocks_per_seq, window;
  int split_tokens, max_slots, in_place;
  float scale, v_scale;
  void* out;
  float* workspace;
  const float* sinks;

  __device__ int group() const { return num_heads / num_kv_heads; }
  __device__ bool is_causal() const { return window >= -1; }
  // Positions that a row sees up to its own; 0: all, below 0: all but the first.
  __device__ int span() const { return window >= -2 - window ? window : -2 - window; }
};

// The positions that a request's rows see: row i up to past + i, or up to the last row's, within [kv_begin, kv_end);
// and the chunks of those.
struct Context {
  int past, kv_begin, kv_end;

  __device__ Context(const AttentionArguments& args, int request, int num_rows) {
    const int64_t table_tokens = static_cast<int64_t>(args.max_blocks_per_seq) * args.tokens_per_block;
    const int capacity = static_cast<int>(table_tokens < kMaxPositions ? table_tokens : kMaxPositions);
    past = clamp(args.kv_lens[request], 0, kMaxPositions) - num_rows;
    kv_end = clamp(past + num_rows, 0, capacity);
    kv_begin = args.span() > 0 ? clamp(past + 1 - args.span(), 0, kv_end) : 0;
  }
  // The end of the positions that row i of the request sees.
  __device__ int row_end(const AttentionArguments& args, int i) const {
    return args.is_causal() ? clamp(past + i + 1, 0, kv_end) : kv_end;
  }
};

// Chunks of a row that sees positions before `end`. The kernels without slots have one.
__device__ inline int num_chunks(const AttentionArguments& args, int end) {
  if (args.max_slots == 0) return 1;
  const int found = (end + args.split_tokens / 2) >> (31 - __clz(args.split_tokens));
  return found < 1 ? 1 : found;
}

// The chunk of a position, of a row or of rows with this number of chunks.
__device__ inline int chunk_of(const AttentionArguments& args, int position, int num_chunks) {
  return clamp(position >> (31 - __clz(args.split_tokens)), 0, num_chunks - 1);
}

// Chunks [first, end) of a request: those that one of its rows has.
struct RequestChunks {
  int first, end;

  __device__ RequestChunks(const AttentionArguments& args, const Context& context)
      : first(chunk_of(args, context.kv_begin, num_chunks(args, context.row_end(args, 0)))),
        end(num_chunks(args, context.kv_end)) {}
};

// An item of a request, which has the rows [first_row, first_row + num_rows). first_slot: the first of the slots that
// are not a row's own, -1 if one block does all chunks of a tile. item: the index among its items, of which first_item
// is the first among all. request < 0: none.
struct Work {
  int request, first_row, num_rows, first_slot, first_item, item;
};

// The slot of a row's chunk, counted from the request's first, if several blocks share the request.
__device__ inline int64_t slot_of(const AttentionArguments& args, const RequestChunks& chunks, const Work& mine,
                                  int row, int place) {
  if (place == 0) return row;
  const int64_t before = static_cast<int64_t>(row - mine.first_row) * (chunks.end - chunks.first - 1) + place - 1;
  return args.num_rows + mine.first_slot + before;
}

// A search for an item, and where it goes on: at the request `base`, with what is before it.
struct Search {
  int item, base, items_before, slots_before;
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
// rows, or such a tile of a chunk. kByRow: `wanted` is a row, and the returned item is meaningless. A later search for
// a later item goes on where the last one ended.
template <bool kByRow>
__device__ Work find_work(const AttentionArguments& args, int tile_rows, Search& search) {
  const int lane = threadIdx.x % kWarpSize, group = args.group();
  const int num_free = args.max_slots - args.num_rows;
  for (; search.base < args.batch_size; search.base += kWarpSize) {
    const int b = search.base + lane;
    int begin = 0, count = 0, more_chunks = 0, slots = 0, slots_end = search.slots_before;
    if (b < args.batch_size) {
      begin = clamp(args.cu_q_lens[b], 0, args.num_rows);
      count = clamp(args.cu_q_lens[b + 1], begin, args.num_rows) - begin;
      if (num_free > 0 && count > 0 && count * group <= kMaxSplitRows) {
        const Context context(args, b, count);
        const RequestChunks chunks(args, context);
        more_chunks = chunks.end - 1 - chunks.first;
        // Larger numbers are cut to one too many, which does not overflow.
        slots = clamp(count * clamp(more_chunks, 0, num_free + 1), 0, num_free + 1);
      }
    }
    if (__any_sync(kFullMask, slots > 0)) slots_end += warp_inclusive_sum(slots);
    const bool is_split = slots > 0 && slots_end <= num_free;
    const int items = ceil_div(count * group, tile_rows) * (is_split ? more_chunks + 1 : 1);
    const int end = search.items_before + warp_inclusive_sum(items);
    const unsigned found =
        __ballot_sync(kFullMask, kByRow ? search.item >= begin && search.item < begin + count : search.item < end);
    if (found != 0) {
      const int owner = __ffs(found) - 1;
      const int first_item = __shfl_sync(kFullMask, end - items, owner);
      return {search.base + owner,
              __shfl_sync(kFullMask, begin, owner),
              __shfl_sync(kFullMask, count, owner),
              __shfl_sync(kFullMask, is_split ? slots_end - slots : -1, owner),
              first_item,
              search.item - first_item};
    }
    search.items_before = __shfl_sync(kFullMask, end, kWarpSize - 1);
    search.slots_before = clamp(__shfl_sync(kFullMask, slots_end, kWarpSize - 1), 0, num_free + 1);
  }
  return {-1, 0, 0, -1, 0, 0};
}

}  // namespace faser

#endif  // FASER_CUDA_ATTENTION_WORK_CUH_
