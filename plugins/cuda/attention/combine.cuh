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

// Four columns of kAtOnce rows whose chunks other blocks may have written, so not by way of the first-level cache. Rows
// of which `count` is 0 do not exist. A row's slots are `first` and then those from `others` on.
template <typename T, int kAtOnce>
struct ChunkMerger {
  int64_t first[kAtOnce], others[kAtOnce];
  int count[kAtOnce], column[kAtOnce];
  T* out[kAtOnce];

  __device__ void set(int j, const AttentionArguments& args, const Work& mine, const Context& context,
                      const RequestChunks& chunks, int row, int head, int head_dim, int at, T* to) {
    first[j] = static_cast<int64_t>(row) * args.num_heads + head;
    others[j] = slot_of(args, chunks, mine, row, 1) * args.num_heads + head;
    count[j] = num_chunks(args, context.row_end(args, row - mine.first_row)) - chunks.first;
    column[j] = at;
    out[j] = to + first[j] * head_dim + at;
  }

  __device__ void run(const AttentionArguments& args, int head_dim) const {
    const Partial* partials = partials_of(args, head_dim);
    float4 sums[kAtOnce] = {};
    Partial whole[kAtOnce] = {};
    int most = 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) most = count[j] > most ? count[j] : most;
#pragma unroll 4
    for (int c = 0; c < most; c++) {
#pragma unroll
      for (int j = 0; j < kAtOnce; j++) {
        if (c >= count[j]) continue;
        const int64_t at = c == 0 ? first[j] : others[j] + static_cast<int64_t>(c - 1) * args.num_heads;
        const float4 more = __ldcg(reinterpret_cast<const float4*>(args.workspace + at * head_dim + column[j]));
        const float2 partial = __ldcg(reinterpret_cast<const float2*>(partials + at));
        if (c == 0) {
          sums[j] = more;
          whole[j] = {partial.x, partial.y};
          continue;
        }
        const Merge merge(whole[j], {partial.x, partial.y});
        whole[j] = merge.both;
        sums[j] = make_float4(merge.of(sums[j].x, more.x), merge.of(sums[j].y, more.y), merge.of(sums[j].z, more.z),
                              merge.of(sums[j].w, more.w));
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      if (count[j] == 0) continue;
      const float normalise = normalisation(args, whole[j]);
      *reinterpret_cast<uint2*>(out[j]) = make_uint2(pack2<T>(sums[j].x * normalise, sums[j].y * normalise),
                                                     pack2<T>(sums[j].z * normalise, sums[j].w * normalise));
    }
  }
};

// Merges the chunks of a tile's rows, with all threads of the block.
template <typename T, typename Tiles>
__device__ void combine_tile(const AttentionArguments& args, const Work& mine, const Context& context,
                             const RequestChunks& chunks, int first_packed) {
  constexpr int kAtOnce = 1, kQuads = Tiles::kHeadDim / 4;
  const int group = args.group(), left = mine.num_rows * group - first_packed;
  const int num_items = (left < Tiles::kTileRows ? left : Tiles::kTileRows) * kQuads;
  for (int base = opaque(threadIdx.x); base < num_items; base += kAtOnce * Tiles::kNumThreads) {
    ChunkMerger<T, kAtOnce> merger;
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      const int item = base + j * Tiles::kNumThreads, packed = first_packed + item / kQuads;
      merger.count[j] = 0;
      if (item >= num_items) continue;
      const int head = static_cast<int>(blockIdx.y) * group + packed % group;
      merger.set(j, args, mine, context, chunks, mine.first_row + packed / group, head, Tiles::kHeadDim,
                 item % kQuads * 4, static_cast<T*>(args.out));
    }
    merger.run(args, Tiles::kHeadDim);
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
    ChunkMerger<T, 1> merger;
    merger.set(0, args, mine, context, chunks, row, head, head_dim, column, out);
    merger.run(args, head_dim);
  }
}

}  // namespace faser

#endif  // FASER_CUDA_ATTENTION_COMBINE_CUH_
