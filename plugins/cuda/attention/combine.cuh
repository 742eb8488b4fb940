// Merges the partial results of rows whose chunks several blocks computed.
#ifndef FASER_CUDA_ATTENTION_COMBINE_CUH_
#define FASER_CUDA_ATTENTION_COMBINE_CUH_

#include "../common.cuh"
#include "result.cuh"
#include "work.cuh"

namespace faser {

// Limit on the items of a launch in which the last block of a tile merges its chunks, times KV heads.
constexpr int kMaxArrivals = 1 << 17;

// How many blocks of a tile have written their chunks: of tile i of a request at the place (the request's first item +
// i) * num_kv_heads + KV head. All are 0 before and after a launch.
static __device__ uint32_t tiles_arrived[kMaxArrivals];

// Merges the chunks of a row and head into four columns of `out`. Other blocks may just have written them, so they are
// not read by way of the first-level cache.
template <typename T>
__device__ void merge_columns(const AttentionArguments& args, const Work& mine, const Context& context,
                              const RequestChunks& chunks, int row, int head, int head_dim, int column, T* out) {
  const Partial* partials = partials_of(args, head_dim);
  const int64_t first = static_cast<int64_t>(row) * args.num_heads + head;
  const int64_t others = slot_of(args, chunks, mine, row, 1) * args.num_heads + head;
  const int count = num_chunks(args, context.row_end(args, row - mine.first_row)) - chunks.first;
  // The first chunk is merged with nothing, so that the loads of several chunks are in flight.
  float4 sums = {};
  Partial whole{-INFINITY, 0.0f};
#pragma unroll 4
  for (int c = 0; c < count; c++) {
    const int64_t at = c == 0 ? first : others + static_cast<int64_t>(c - 1) * args.num_heads;
    const float4 more = __ldcg(reinterpret_cast<const float4*>(args.workspace + at * head_dim + column));
    const float2 partial = __ldcg(reinterpret_cast<const float2*>(partials + at));
    const Merge merge(whole, {partial.x, partial.y});
    whole = merge.both;
    sums = make_float4(merge.of(sums.x, more.x), merge.of(sums.y, more.y), merge.of(sums.z, more.z),
                       merge.of(sums.w, more.w));
  }
  const float normalize = normalization(args, whole, head);
  *reinterpret_cast<uint2*>(out + first * head_dim + column) =
      make_uint2(pack2<T>(sums.x * normalize, sums.y * normalize), pack2<T>(sums.z * normalize, sums.w * normalize));
}

// Merges the chunks of a tile's rows, with all threads of the block.
template <typename T, typename Tiles>
__device__ void combine_tile(const AttentionArguments& args, const Work& mine, const Context& context,
                             const RequestChunks& chunks, int first_packed) {
  constexpr int kQuads = Tiles::kHeadDim / 4;
  const int group = args.group(), left = mine.num_rows * group - first_packed;
  const int num_items = (left < Tiles::kTileRows ? left : Tiles::kTileRows) * kQuads;
  for (int item = threadIdx.x; item < num_items; item += Tiles::kNumThreads) {
    const int packed = first_packed + item / kQuads, i = packed / group;
    const int head = static_cast<int>(blockIdx.y) * group + packed - i * group;
    merge_columns(args, mine, context, chunks, mine.first_row + i, head, Tiles::kHeadDim, item % kQuads * 4,
                  static_cast<T*>(args.out));
  }
}

// Merges the chunks of row blockIdx.x with one warp per head. Rows of which one block did all chunks are copied from
// `whole`, unless that is `out`.
template <typename T>
__device__ void combine(const AttentionArguments& args, const T* whole, int head_dim, T* out) {
  const int row = blockIdx.x, lane = threadIdx.x % kWarpSize;
  const int head = static_cast<int>(blockIdx.y * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize);
  if (head >= args.num_heads) return;
  Search search{row, 0, 0, 0};
  const Work mine = find_work<true>(args, 16, search);
  if (mine.first_slot < 0) {
    if (whole == out) return;
    const int64_t at = (static_cast<int64_t>(row) * args.num_heads + head) * head_dim;
    for (int column = 2 * lane; column < head_dim; column += 2 * kWarpSize) {
      *reinterpret_cast<uint32_t*>(out + at + column) = *reinterpret_cast<const uint32_t*>(whole + at + column);
    }
    return;
  }
  const Context context(args, mine.request, mine.num_rows);
  const RequestChunks chunks(args, context);
  for (int column = 4 * lane; column < head_dim; column += 4 * kWarpSize) {
    merge_columns(args, mine, context, chunks, row, head, head_dim, column, out);
  }
}

}  // namespace faser

#endif  // FASER_CUDA_ATTENTION_COMBINE_CUH_
