// Attention of a tile's rows over a chunk of positions, or over all chunks that they see.
#ifndef FASER_CUDA_ATTENTION_ATTEND_CUH_
#define FASER_CUDA_ATTENTION_ATTEND_CUH_

#include "../common.cuh"
#include "combine.cuh"
#include "result.cuh"
#include "tiling.cuh"
#include "work.cuh"

namespace faser {

// A tile of an item's rows: packed rows [first_packed, num_packed) as far as the tile reaches, the positions that they
// see, and their chunks.
struct RowTile {
  Work mine;
  Context context;
  RequestChunks chunks;
  int group, num_packed, place, first_packed, kv_begin, kv_end, first_chunk, chunks_end;

  // place: of the chunk among the request's, if several blocks share the request.
  __device__ RowTile(const AttentionArguments& args, const Work& mine, int tile_rows)
      : mine(mine), context(args, mine.request, mine.num_rows), chunks(args, context), group(args.group()) {
    num_packed = mine.num_rows * group;
    const int num_tiles = ceil_div(num_packed, tile_rows);
    place = is_split() ? mine.item / num_tiles : 0;
    first_packed = (mine.item - place * num_tiles) * tile_rows;
    kv_end = context.row_end(args, clamp(first_packed + tile_rows - 1, 0, num_packed - 1) / group);
    const int first = context.past + first_packed / group + 1;
    kv_begin = args.span() > 0 ? clamp(first - args.span(), 0, kv_end) : 0;
    first_chunk = is_split() ? chunks.first + place : chunk_of(args, kv_begin, num_chunks(args, first_end(args)));
    chunks_end = is_split() ? first_chunk + 1 : num_chunks(args, kv_end);
  }
  __device__ bool is_split() const { return mine.first_slot >= 0; }
  // The end of the positions that the first row sees.
  __device__ int first_end(const AttentionArguments& args) const { return context.row_end(args, first_packed / group); }

  // What becomes of the tile's row r after a chunk. is_last: the tile's last one, of which a row may be whole before.
  __device__ RowPlan plan(const AttentionArguments& args, int r, int chunk, bool walks_on, bool is_last) const {
    const int packed = first_packed + r, i = packed / group;
    const int row = mine.first_row + i, head = static_cast<int>(blockIdx.y) * group + packed - i * group;
    const int count = packed < num_packed ? num_chunks(args, context.row_end(args, i)) : 0;
    if (is_split()) return {chunk < count, false, false, row, head, slot_of(args, chunks, mine, row, place)};
    if (!walks_on) return {chunk<count, chunk> first_chunk, chunk + 1 == count, row, head, row};
    if (is_last) return {count > 0, count > first_chunk + 1, true, row, head, row};
    return {chunk + 1 < count, chunk > first_chunk, false, row, head, row};
  }
};

// Does the work of an item; where the warps stop after each chunk, only of its chunk `step`. Returns true if there is a
// further one.
template <typename T, typename Kv, typename Tiles>
__device__ bool attend(const AttentionArguments& args, const Work& mine, int step) {
  constexpr int kHeadDim = Tiles::kHeadDim, kStride = Tiles::kStride, kNumSlots = Tiles::kNumSlots;
  constexpr int kKSteps = kHeadDim / 16, kScoreTiles = Tiles::kWarpTokens / 8;
  __shared__ __align__(16) char pool[Tiles::kPoolBytes];

  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int row_warp = warp % Tiles::kRowWarps, kv_warp = warp / Tiles::kRowWarps;
  const int kv_head = blockIdx.y, group = args.group();

  const RowTile tile(args, mine, Tiles::kTileRows);
  const int past = tile.context.past, first_packed = tile.first_packed, num_packed = tile.num_packed;
  const int kv_begin = tile.kv_begin, kv_end = tile.kv_end;
  // Warps that share the positions walk over all chunks of the tile without a stop.
  const bool stops = Tiles::kByPositions || tile.is_split();
  // Rows with a further chunk end at `border`; a row whose last chunk this is may see up to half a chunk more.
  const int half_chunk = args.split_tokens / 2;
  int chunk = tile.first_chunk + step, begin = kv_begin, end = kv_end, border = kMaxPositions;
  if (chunk + 1 < num_chunks(args, kv_end)) border = (chunk + 1) * args.split_tokens;
  if (stops) {
    begin = clamp(begin, chunk * args.split_tokens, kMaxPositions);
    end = clamp(end, 0, tile.first_end(args) >= border + half_chunk ? border : border + half_chunk - 1);
  }
  const int first_tile = begin / Tiles::kTileTokens;
  const int num_tiles = clamp(ceil_div(end, Tiles::kTileTokens) - first_tile, 0, kMaxPositions);

  const KvReader<Kv, Tiles> reader{thread,
                                   args.block_table + static_cast<int64_t>(tile.mine.request) * args.max_blocks_per_seq,
                                   FastDivision(args.tokens_per_block),
                                   args.tokens_per_block,
                                   args.num_blocks,
                                   kv_begin,
                                   kv_end,
                                   static_cast<int64_t>(args.num_kv_heads) * args.tokens_per_block * kHeadDim,
                                   static_cast<int64_t>(kv_head) * args.tokens_per_block * kHeadDim};
  // Halves are K and V of a tile in turn; half h goes to slot h mod kNumSlots. Past the end an empty group is
  // committed, so that the number of groups in flight is constant, and no copy is in flight once the last half has
  // arrived.
  char* const copies = pool + kv_warp * Tiles::kCopyBytes;
  auto fetch = [&](int half) {
    if (half < 2 * num_tiles) {
      const Kv* cache = static_cast<const Kv*>(half % 2 == 0 ? args.k_cache : args.v_cache);
      reader.copy(cache, (first_tile + half / 2) * Tiles::kTileTokens + kv_warp * Tiles::kWarpTokens,
                  copies + Tiles::kConvertedBytes + half % kNumSlots * Tiles::kSlotBytes);
    }
    cp_async_commit();
  };
  auto wait_for_sharers = [] {
    if constexpr (Tiles::kByPositions) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };
  // Waits for half h and returns it in T to all threads that share it; starts to copy the next half to the slot that
  // half h - 1 has left.
  auto arrive = [&](int half) -> const T* {
    cp_async_wait<kNumSlots - 2>();
    wait_for_sharers();
    fetch(half + kNumSlots - 1);
    char* slot = copies + Tiles::kConvertedBytes + half % kNumSlots * Tiles::kSlotBytes;
    if constexpr (Tiles::kIsFp8) {
      convert_tile<T, Tiles>(thread, slot, reinterpret_cast<T*>(copies));
      wait_for_sharers();
      slot = copies;
    }
    return reinterpret_cast<const T*>(slot);
  };
#pragma unroll
  for (int half = 0; half < kNumSlots - 1; half++) fetch(half);

  // This lane's two rows of the tile: lane / 4 and lane / 4 + 8.
  const bool warp_has_rows = first_packed + row_warp * 16 < num_packed;
  int limit[2];
  const T* q_row[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int packed = first_packed + row_warp * 16 + lane / 4 + 8 * i;
    const bool exists = packed < num_packed;
    const int row = tile.mine.first_row + packed / group, head = kv_head * group + packed % group;
    limit[i] = exists ? past + packed / group : -1;
    q_row[i] = exists ? static_cast<const T*>(args.q) + (static_cast<int64_t>(row) * args.num_heads + head) * kHeadDim +
                            2 * (lane % 4)
                      : nullptr;
  }
  uint32_t q[kKSteps][4];
#pragma unroll
  for (int k = 0; k < kKSteps; k++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const T* source = q_row[i % 2];
      q[k][i] = source != nullptr ? *reinterpret_cast<const uint32_t*>(source + 16 * k + 8 * (i / 2)) : 0;
    }
  }

  const float scale = args.scale * kLog2E;
  float out[kHeadDim / 8][4], top[2], sum[2];
  // Begins the rows' sums.
  auto clear = [&](int i) {
    top[i] = -INFINITY;
    sum[i] = 0.0f;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n++) out[n][2 * i] = out[n][2 * i + 1] = 0.0f;
  };
  // Writes the chunk's results, if warps share the positions, and begins the sums of rows that have a further chunk.
  auto write_rows = [&](bool is_end) {
    Partial before[2] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const RowPlan plan = tile.plan(args, row_warp * 16 + lane / 4 + 8 * i, chunk, true, is_end);
      if (plan.exists && plan.is_merged) before[i] = partials_of(args, kHeadDim)[plan.in_slots(args)];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float total = sum[i] + __shfl_xor_sync(kFullMask, sum[i], 1);
      total += __shfl_xor_sync(kFullMask, total, 2);
      const RowPlan plan = tile.plan(args, row_warp * 16 + lane / 4 + 8 * i, chunk, true, is_end);
      if (!plan.exists) continue;
      const Partial mine{__fmul_rn(top[i], scale), total};
      const Merge merge = plan.is_merged ? Merge(before[i], mine) : Merge(mine);
      if (!plan.is_whole && lane % 4 == 0) partials_of(args, kHeadDim)[plan.in_slots(args)] = merge.both;
      const ResultWriter<T, kHeadDim> writer(args, plan, merge);
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n++) writer.pair(8 * n + 2 * (lane % 4), out[n][2 * i], out[n][2 * i + 1]);
      if (!is_end) clear(i);
    }
  };

  // Every row of the warp sees [all_from, all_to) without a mask, unless the window is below -2. Conditions on the
  // window are evaluated where they are needed, since the loop has no register left for them with heads of 128.
  const int warp_first = (first_packed + row_warp * 16) / group;
  const int warp_last = clamp(first_packed + row_warp * 16 + 15, 0, num_packed - 1) / group;
  const int all_from = args.window > 0 ? past + warp_last + 1 - args.window : args.window < 0 ? 1 : 0;
  const int none_from = past + warp_last + 1;

  clear(0);
  clear(1);

  for (int t = 0;;) {
    const bool is_end = stops || chunk + 1 >= num_chunks(args, kv_end);
    const int until = is_end ? num_tiles : clamp(border / Tiles::kTileTokens - first_tile, t, num_tiles);
    for (; t < until; t++) {
      const int first = (first_tile + t) * Tiles::kTileTokens + kv_warp * Tiles::kWarpTokens;
      const bool computes = warp_has_rows && (first < none_from || !args.is_causal()) && first < kv_end;
      uint32_t weights[kScoreTiles / 2][4];

      const T* keys = arrive(2 * t);
      if (computes) {
        float score[kScoreTiles][4] = {};
        const T* key = keys + (lane / 16 * 8 + lane % 8) * kStride;
#pragma unroll
        for (int k = 0; k < kKSteps; k++) {
#pragma unroll
          for (int n = 0; n < kScoreTiles / 2; n++) {
            uint32_t b[4];
            ldmatrix_x4(b, key + n * 16 * kStride + Tiles::place(lane, 2 * k + lane / 8 % 2));
            mma_m16n8k16<T>(score[2 * n], q[k], b[0], b[1]);
            mma_m16n8k16<T>(score[2 * n + 1], q[k], b[2], b[3]);
          }
        }
        const int last_position = first + Tiles::kWarpTokens - 1;
        if (first < all_from || last_position > past + warp_first || last_position >= kv_end ||
            (stops && last_position >= border) || args.window < -2) {
#pragma unroll
          for (int n = 0; n < kScoreTiles; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const int position = first + 8 * n + 2 * (lane % 4) + i % 2, last = limit[i / 2];
              const bool in_window = args.span() <= 0 || position > last - args.span();
              const bool is_first = args.window == -1 && position == 0 && last > 0;
              const bool is_later = stops && position >= border && last >= border + half_chunk - 1;
              if ((args.is_causal() && position > last) || position >= kv_end || is_later || !in_window || is_first) {
                score[n][i] = -INFINITY;
              }
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float highest = top[i];
#pragma unroll
          for (int n = 0; n < kScoreTiles; n++) highest = fmaxf(highest, fmaxf(score[n][2 * i], score[n][2 * i + 1]));
          highest = fmaxf(highest, __shfl_xor_sync(kFullMask, highest, 1));
          highest = fmaxf(highest, __shfl_xor_sync(kFullMask, highest, 2));
          // A row that has seen nothing yet has weights 0 rather than exp2(-inf + inf).
          const float shift = highest == -INFINITY ? 0.0f : highest * scale;
          const float keep = exp2_approx(top[i] * scale - shift);
          top[i] = highest;
          sum[i] *= keep;
#pragma unroll
          for (int n = 0; n < kHeadDim / 8; n++) {
            out[n][2 * i] *= keep;
            out[n][2 * i + 1] *= keep;
          }
#pragma unroll
          for (int n = 0; n < kScoreTiles; n++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
              score[n][2 * i + j] = exp2_approx(score[n][2 * i + j] * scale - shift);
              sum[i] += score[n][2 * i + j];
            }
          }
        }
#pragma unroll
        for (int n = 0; n < kScoreTiles / 2; n++) {
          weights[n][0] = pack2<T>(score[2 * n][0], score[2 * n][1]);
          weights[n][1] = pack2<T>(score[2 * n][2], score[2 * n][3]);
          weights[n][2] = pack2<T>(score[2 * n + 1][0], score[2 * n + 1][1]);
          weights[n][3] = pack2<T>(score[2 * n + 1][2], score[2 * n + 1][3]);
        }
      }

      const T* values = arrive(2 * t + 1);
      if (computes) {
        const T* value = values + lane % 16 * kStride;
#pragma unroll
        for (int n = 0; n < kScoreTiles / 2; n++) {
#pragma unroll
          for (int k = 0; k < kKSteps; k++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, value + n * 16 * kStride + Tiles::place(lane, 2 * k + lane / 16));
            mma_m16n8k16<T>(out[2 * k], weights[n], b[0], b[1]);
            mma_m16n8k16<T>(out[2 * k + 1], weights[n], b[2], b[3]);
          }
        }
      }
    }
    if constexpr (!Tiles::kByPositions) write_rows(is_end);
    if (is_end) break;
    chunk++;
    border += args.split_tokens;
  }

  if constexpr (Tiles::kByPositions) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      sum[i] += __shfl_xor_sync(kFullMask, sum[i], 1);
      sum[i] += __shfl_xor_sync(kFullMask, sum[i], 2);
    }
    // Merges the warps' results in the memory of the copies, which no warp reads any more.
    float* partial = reinterpret_cast<float*>(pool);
    float* tops = partial + Tiles::kKvWarps * 16 * kHeadDim;
    float* sums = tops + Tiles::kKvWarps * 16;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = lane / 4 + 8 * i;
      if (lane % 4 == 0) {
        tops[kv_warp * 16 + r] = top[i];
        sums[kv_warp * 16 + r] = sum[i];
      }
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n++) {
        *reinterpret_cast<float2*>(partial + (kv_warp * 16 + r) * kHeadDim + 8 * n + 2 * (lane % 4)) =
            make_float2(out[n][2 * i], out[n][2 * i + 1]);
      }
    }
    __syncthreads();
    for (int r = warp; r < 16 && tile.first_packed + r < tile.num_packed; r += Tiles::kKvWarps) {
      const RowPlan plan = tile.plan(args, r, tile.first_chunk + step, false, true);
      if (!plan.exists) continue;
      Partial* const chunk_partial = partials_of(args, kHeadDim) + plan.in_slots(args);
      Partial before{};
      if (plan.is_merged) before = *chunk_partial;
      Partial whole{-INFINITY, 0.0f};
      float weight[Tiles::kKvWarps];
#pragma unroll
      for (int w = 0; w < Tiles::kKvWarps; w++) whole.top = fmaxf(whole.top, tops[w * 16 + r]);
      whole.top = __fmul_rn(whole.top, scale);
      const float shift = whole.top == -INFINITY ? 0.0f : whole.top;
#pragma unroll
      for (int w = 0; w < Tiles::kKvWarps; w++) {
        weight[w] = exp2_approx(tops[w * 16 + r] * scale - shift);
        whole.sum += sums[w * 16 + r] * weight[w];
      }
      const Merge merge = plan.is_merged ? Merge(before, whole) : Merge(whole);
      __syncwarp();  // all lanes have read what was before
      if (!plan.is_whole && lane == 0) *chunk_partial = merge.both;
      const ResultWriter<T, kHeadDim> writer(args, plan, merge);
      for (int column = 2 * lane; column < kHeadDim; column += 2 * kWarpSize) {
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int w = 0; w < Tiles::kKvWarps; w++) {
          const float2 pair = *reinterpret_cast<const float2*>(partial + (w * 16 + r) * kHeadDim + column);
          low += pair.x * weight[w];
          high += pair.y * weight[w];
        }
        writer.pair(column, low, high);
      }
    }
  }

  if (tile.is_split() && args.in_place != 0) {
    // All threads have written before one of them counts the block.
    __syncthreads();  // untested: only other blocks could see the difference, and emulated ones run in turn
    const int place = tile.mine.first_item + tile.first_packed / Tiles::kTileRows;
    uint32_t* arrived = tiles_arrived + place * args.num_kv_heads + kv_head;
    if (is_last_block<false>(arrived, tile.chunks.end - tile.chunks.first)) {
      combine_tile<T, Tiles>(args, tile.mine, tile.context, tile.chunks, tile.first_packed);
    }
  }
  return Tiles::kByPositions && tile.first_chunk + step + 1 < tile.chunks_end;
}

template <typename T, typename Kv, typename Tiles>
__device__ void attend_all(const AttentionArguments& args) {
  fill_rows_of_nobody<T, Tiles>(args);
  Search search{static_cast<int>(blockIdx.x), 0, 0, 0};
  for (;; search.item += gridDim.x) {
    const Work mine = find_work<false>(args, Tiles::kTileRows, search);
    if (mine.request < 0) return;
    for (int step = 0; attend<T, Kv, Tiles>(args, mine, step); step++) __syncthreads();  // the pool is free
    if (args.max_slots == 0) return;                                                     // there is a block per tile
    __syncthreads();                                                                     // the pool is free
  }
}

}  // namespace faser

#endif  // FASER_CUDA_ATTENTION_ATTEND_CUH_
