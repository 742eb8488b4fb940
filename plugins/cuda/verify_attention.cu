// Attention of ragged rows over a paged KV cache.
//
// The rows of a request times the query heads of one KV head are packed into tiles of 16 or 64: n rows with groups of G
// heads fill n * G of them, so K and V are read from memory once per request and KV head if n * G fits the tile. That
// is the roofline: kv_len * 2 * head_dim * sizeof(KV) bytes per request and KV head over the memory's bandwidth. Long
// chunks of context are bound by the tensor cores instead. README.md of this folder has times.
//
// Blocks find their work on the device (attention/work.cuh), so the host only needs bounds. A block processes every
// gridDim.x-th item. The positions of long contexts are cut into chunks: then a block writes a normalised partial
// result and its log2 sum into the workspace, and verify_attention_combine merges them.
//
// A window of -1 hides the first position from all rows but its own: an EAGLE-3 head runs it without a hidden row. With
// a window of -2 - w, rows see all rows of their request, as in a block drafter's block, and w positions up to their
// own (0: all).
//
// FASER_HEAD_DIM=H compiles a single head size.
//
// 64 rows of 256 values are more than the registers hold: where spills are allowed below, a few addresses are read back
// once per tile or item.
// limits of *_h256_m64: registers <= 255, spill_bytes <= 232, shared_bytes <= 49152
// limits of *_h256_m16: registers <= 255, spill_bytes <= 588, shared_bytes <= 49152
// limits of *_h80_m64: registers <= 168, spill_bytes <= 84, shared_bytes <= 49152
// limits of *_h96_m64: registers <= 240, spill_bytes <= 0, shared_bytes <= 49152
// limits of *_h128_m64: registers <= 249, spill_bytes <= 0, shared_bytes <= 49152
// limits of *_h128_m16: registers <= 168, spill_bytes <= 56, shared_bytes <= 49152
// limits of verify_attention_combine_*: registers <= 96, spill_bytes <= 0, shared_bytes <= 0
// limits: registers <= 168, spill_bytes <= 0, shared_bytes <= 49152
#include "attention/combine.cuh"
#include "attention/result.cuh"
#include "attention/tiling.cuh"
#include "attention/work.cuh"
#include "common.cuh"

#ifndef FASER_HEAD_DIM
#define FASER_HEAD_DIM 0
#endif

namespace faser {

template <typename T, typename Kv, typename Tiles>
__device__ void attend(const AttentionArguments& args, const Work& mine) {
  constexpr int kHeadDim = Tiles::kHeadDim, kStride = Tiles::kStride, kNumSlots = Tiles::kNumSlots;
  constexpr int kKSteps = kHeadDim / 16, kScoreTiles = Tiles::kWarpTokens / 8;
  __shared__ __align__(16) char pool[Tiles::kPoolBytes];

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int row_warp = warp % Tiles::kRowWarps, kv_warp = warp / Tiles::kRowWarps;
  const int kv_head = blockIdx.y, group = args.group();

  // Positions visible to the tile's rows, within the chunk.
  const Context context(args, mine.request, mine.num_rows);
  const int past = context.past, num_packed = mine.num_rows * group;
  const bool is_split = mine.first_slot >= 0;
  const int num_row_tiles = ceil_div(num_packed, Tiles::kTileRows);
  const int chunk = is_split ? mine.item / num_row_tiles : 0;
  const int first_packed = (mine.item - chunk * num_row_tiles) * Tiles::kTileRows;
  const int last_packed = clamp(first_packed + Tiles::kTileRows - 1, 0, num_packed - 1);
  const int kv_end = args.is_causal() ? clamp(past + last_packed / group + 1, 0, context.kv_end) : context.kv_end;
  const int kv_begin = args.span() > 0 ? clamp(past + first_packed / group + 1 - args.span(), 0, kv_end) : 0;
  int begin = kv_begin, end = kv_end, num_chunks = 0;
  if (is_split) {
    const int from = (context.first_chunk(args.split_tokens) + chunk) * args.split_tokens;
    num_chunks = context.num_chunks(args.split_tokens);
    begin = clamp(begin, from, kMaxPositions);
    end = clamp(end, 0, from + args.split_tokens);
  }
  const ResultWriter<T, kHeadDim> writer{args, mine.first_slot - mine.first_row * num_chunks + chunk, num_chunks};
  const int first_tile = begin / Tiles::kTileTokens;
  const int num_tiles = clamp(ceil_div(end, Tiles::kTileTokens) - first_tile, 0, kMaxPositions);

  const KvReader<Kv, Tiles> reader{args.block_table + static_cast<int64_t>(mine.request) * args.max_blocks_per_seq,
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
      convert_tile<T, Tiles>(slot, reinterpret_cast<T*>(copies));
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
    const int row = mine.first_row + packed / group, head = kv_head * group + packed % group;
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

  const float scale = args.scale * 1.4426950408889634f;
  float out[kHeadDim / 8][4] = {};
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
  // Every row of the warp sees [all_from, all_to) without a mask, unless the window is below -2. Conditions on the
  // window are evaluated where they are needed, since the loop has no register left for them with heads of 128.
  const int warp_first = (first_packed + row_warp * 16) / group;
  const int warp_last = clamp(first_packed + row_warp * 16 + 15, 0, num_packed - 1) / group;
  const int all_to = past + warp_first + 1;
  const int all_from = args.window > 0 ? past + warp_last + 1 - args.window : args.window < 0 ? 1 : 0;
  const int none_from = past + warp_last + 1;

  for (int t = 0; t < num_tiles; t++) {
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
      if (first < all_from || first + Tiles::kWarpTokens > all_to || first + Tiles::kWarpTokens > kv_end ||
          args.window < -2) {
#pragma unroll
        for (int n = 0; n < kScoreTiles; n++) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int position = first + 8 * n + 2 * (lane % 4) + i % 2, last = limit[i / 2];
            const bool in_window = args.span() <= 0 || position > last - args.span();
            const bool is_first = args.window == -1 && position == 0 && last > 0;
            if ((args.is_causal() && position > last) || position >= kv_end || !in_window || is_first) {
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

#pragma unroll
  for (int i = 0; i < 2; i++) {
    sum[i] += __shfl_xor_sync(kFullMask, sum[i], 1);
    sum[i] += __shfl_xor_sync(kFullMask, sum[i], 2);
  }
  if constexpr (!Tiles::kByPositions) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int packed = first_packed + row_warp * 16 + lane / 4 + 8 * i;
      if (packed >= num_packed) continue;
      const int row = mine.first_row + packed / group, head = kv_head * group + packed % group;
      const float normalise = sum[i] == 0.0f ? 0.0f : args.v_scale / sum[i];
      if (lane % 4 == 0) writer.log2_sum(row, head, sum[i] == 0.0f ? -INFINITY : top[i] * scale + log2f(sum[i]));
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n++) {
        writer.pair(row, head, 8 * n + 2 * (lane % 4), out[n][2 * i] * normalise, out[n][2 * i + 1] * normalise);
      }
    }
  } else {
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
    for (int r = warp; r < 16 && first_packed + r < num_packed; r += Tiles::kKvWarps) {
      float highest = -INFINITY, total = 0.0f, weight[Tiles::kKvWarps];
#pragma unroll
      for (int w = 0; w < Tiles::kKvWarps; w++) highest = fmaxf(highest, tops[w * 16 + r]);
      const float shift = highest == -INFINITY ? 0.0f : highest * scale;
#pragma unroll
      for (int w = 0; w < Tiles::kKvWarps; w++) {
        weight[w] = exp2_approx(tops[w * 16 + r] * scale - shift);
        total += sums[w * 16 + r] * weight[w];
      }
      const float normalise = total == 0.0f ? 0.0f : args.v_scale / total;
      const int packed = first_packed + r, out_row = mine.first_row + packed / group;
      const int out_head = kv_head * group + packed % group;
      if (lane == 0) writer.log2_sum(out_row, out_head, total == 0.0f ? -INFINITY : shift + log2f(total));
      for (int column = 2 * lane; column < kHeadDim; column += 2 * kWarpSize) {
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int w = 0; w < Tiles::kKvWarps; w++) {
          const float2 pair = *reinterpret_cast<const float2*>(partial + (w * 16 + r) * kHeadDim + column);
          low += pair.x * weight[w];
          high += pair.y * weight[w];
        }
        writer.pair(out_row, out_head, column, low * normalise, high * normalise);
      }
    }
  }
}

template <typename T, typename Kv, typename Tiles>
__device__ void attend_all(const AttentionArguments& args) {
  fill_rows_of_nobody<T, Tiles>(args);
  for (int item = blockIdx.x;; item += gridDim.x) {
    const Work mine = find_work<false>(args, Tiles::kTileRows, item);
    if (mine.request < 0) return;
    attend<T, Kv, Tiles>(args, mine);
    if (args.max_slots == 0) return;  // there is a block for every tile
    __syncthreads();                  // the pool is free
  }
}

}  // namespace faser

// Grid (blocks, num_kv_heads). Without slots there are more blocks than tiles: (num_rows * group + min(num_rows,
// batch_size) * (tile_rows - 1)) / tile_rows + 1 at least; with slots any number does.
// scale_bits: the softmax scale times that of an e4m3 K.
#define FASER_VERIFY_ATTENTION(NAME, T, KV, HEAD_DIM, TILE_ROWS)                                                     \
  extern "C" __global__ void __launch_bounds__(faser::Tiling<KV, HEAD_DIM, TILE_ROWS>::kNumThreads,                  \
                                               faser::Tiling<KV, HEAD_DIM, TILE_ROWS>::kMinBlocks)                   \
      verify_attention_##NAME##_h##HEAD_DIM##_m##TILE_ROWS(                                                          \
          const void* q, const void* k_cache, const void* v_cache, const int32_t* block_table,                       \
          const int32_t* cu_q_lens, const int32_t* kv_lens, int32_t num_rows, int32_t batch_size, int32_t num_heads, \
          int32_t num_kv_heads, int32_t num_blocks, int32_t tokens_per_block, int32_t max_blocks_per_seq,            \
          int32_t window, int32_t split_tokens, int32_t max_slots, int32_t scale_bits, int32_t v_scale_bits,         \
          void* out, float* workspace) {                                                                             \
    faser::attend_all<T, KV, faser::Tiling<KV, HEAD_DIM, TILE_ROWS>>({q,                                             \
                                                                      k_cache,                                       \
                                                                      v_cache,                                       \
                                                                      block_table,                                   \
                                                                      cu_q_lens,                                     \
                                                                      kv_lens,                                       \
                                                                      num_rows,                                      \
                                                                      batch_size,                                    \
                                                                      num_heads,                                     \
                                                                      num_kv_heads,                                  \
                                                                      num_blocks,                                    \
                                                                      tokens_per_block,                              \
                                                                      max_blocks_per_seq,                            \
                                                                      window,                                        \
                                                                      split_tokens,                                  \
                                                                      max_slots,                                     \
                                                                      faser::float_of_bits(scale_bits),              \
                                                                      faser::float_of_bits(v_scale_bits),            \
                                                                      out,                                           \
                                                                      workspace});                                   \
  }

#define FASER_VERIFY_ATTENTION_OF_HEAD(HEAD_DIM)                            \
  FASER_VERIFY_ATTENTION(bf16, faser::bf16, faser::bf16, HEAD_DIM, 16)      \
  FASER_VERIFY_ATTENTION(bf16, faser::bf16, faser::bf16, HEAD_DIM, 64)      \
  FASER_VERIFY_ATTENTION(bf16_e4m3, faser::bf16, faser::e4m3, HEAD_DIM, 16) \
  FASER_VERIFY_ATTENTION(bf16_e4m3, faser::bf16, faser::e4m3, HEAD_DIM, 64) \
  FASER_VERIFY_ATTENTION(fp16, faser::fp16, faser::fp16, HEAD_DIM, 16)      \
  FASER_VERIFY_ATTENTION(fp16, faser::fp16, faser::fp16, HEAD_DIM, 64)      \
  FASER_VERIFY_ATTENTION(fp16_e4m3, faser::fp16, faser::e4m3, HEAD_DIM, 16) \
  FASER_VERIFY_ATTENTION(fp16_e4m3, faser::fp16, faser::e4m3, HEAD_DIM, 64)

#if FASER_HEAD_DIM == 0 || FASER_HEAD_DIM == 64
FASER_VERIFY_ATTENTION_OF_HEAD(64)
#endif
#if FASER_HEAD_DIM == 0 || FASER_HEAD_DIM == 80
FASER_VERIFY_ATTENTION_OF_HEAD(80)
#endif
#if FASER_HEAD_DIM == 0 || FASER_HEAD_DIM == 96
FASER_VERIFY_ATTENTION_OF_HEAD(96)
#endif
#if FASER_HEAD_DIM == 0 || FASER_HEAD_DIM == 128
FASER_VERIFY_ATTENTION_OF_HEAD(128)
#endif
#if FASER_HEAD_DIM == 0 || FASER_HEAD_DIM == 256
FASER_VERIFY_ATTENTION_OF_HEAD(256)
#endif

// Grid (num_rows, ceil(num_heads / 4)), blocks of 128 threads; sizes as in the launch before. 8 blocks per SM allow 64
// registers: by default ptxas uses 32 on sm_80 to sm_89, and spills.
#define FASER_VERIFY_ATTENTION_COMBINE(NAME, T)                                                                        \
  extern "C" __global__ void __launch_bounds__(128, 8) verify_attention_combine_##NAME(                                \
      const T* whole, const float* workspace, const int32_t* cu_q_lens, const int32_t* kv_lens, int32_t num_rows,      \
      int32_t batch_size, int32_t num_heads, int32_t num_kv_heads, int32_t tokens_per_block,                           \
      int32_t max_blocks_per_seq, int32_t window, int32_t split_tokens, int32_t max_slots, int32_t head_dim, T* out) { \
    faser::combine<T>({nullptr,                                                                                        \
                       nullptr,                                                                                        \
                       nullptr,                                                                                        \
                       nullptr,                                                                                        \
                       cu_q_lens,                                                                                      \
                       kv_lens,                                                                                        \
                       num_rows,                                                                                       \
                       batch_size,                                                                                     \
                       num_heads,                                                                                      \
                       num_kv_heads,                                                                                   \
                       0,                                                                                              \
                       tokens_per_block,                                                                               \
                       max_blocks_per_seq,                                                                             \
                       window,                                                                                         \
                       split_tokens,                                                                                   \
                       max_slots,                                                                                      \
                       0.0f,                                                                                           \
                       0.0f,                                                                                           \
                       nullptr,                                                                                        \
                       const_cast<float*>(workspace)},                                                                 \
                      whole, head_dim, out);                                                                           \
  }
FASER_VERIFY_ATTENTION_COMBINE(bf16, faser::bf16)
FASER_VERIFY_ATTENTION_COMBINE(fp16, faser::fp16)
