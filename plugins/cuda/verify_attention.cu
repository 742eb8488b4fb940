// Attention of ragged frontiers over a paged KV cache.
//
// The rows of a request times the query heads of one KV head are packed into tensor-core tiles of 16 or 64: a frontier
// of n rows with groups of G heads fills n * G of them, so K and V are read from memory once per request and KV head as
// long as n * G fits the tile. That is the roofline: kv_len * 2 * head_dim * sizeof(KV) bytes per request
// and KV head over the memory's bandwidth; long chunks of context are bound by the tensor cores instead. Speed: not
// measured.
//
// Blocks are tile x KV head x split. The device finds a tile's request from cu_q_lens, so the host only needs the
// numbers of rows and requests. With splits, a block writes a normalised partial result and its log2
// sum; verify_attention_combine merges them.
//
// FASER_HEAD_DIM=H compiles a single head size.
//
// The first: 64 rows of 256 values are more than the registers hold; a few addresses are read back once per tile.
// limits of *_h256_m64: registers <= 255, spill_bytes <= 96, shared_bytes <= 36864
// limits of *_h256_m16: registers <= 255, spill_bytes <= 0, shared_bytes <= 36864
// limits of *_h96_m64: registers <= 240, spill_bytes <= 0, shared_bytes <= 36864
// limits of *_h128_m64: registers <= 240, spill_bytes <= 0, shared_bytes <= 36864
// limits of verify_attention_combine_*: registers <= 96, spill_bytes <= 0, shared_bytes <= 0
// limits: registers <= 168, spill_bytes <= 0, shared_bytes <= 36864
#include "common.cuh"

#ifndef FASER_HEAD_DIM
#define FASER_HEAD_DIM 0
#endif

namespace faser {

struct AttentionArguments {
  const void* q;
  const void* k_cache;
  const void* v_cache;
  const int32_t* block_table;
  const int32_t* cu_q_lens;
  const int32_t* kv_lens;
  int num_rows, batch_size, num_heads, num_kv_heads, num_blocks, tokens_per_block, max_blocks_per_seq, window;
  int num_splits;
  float scale, v_scale;
  void* out;
};

// Floor of x / divisor for 0 <= x < 2^31 and 1 <= divisor < 2^31, by a multiplication (Hacker's Delight, 10-9).
struct FastDivision {
  uint32_t multiplier;
  int shift;
  __device__ explicit FastDivision(uint32_t divisor) {
    shift = divisor <= 1 ? 0 : 32 - __clz(static_cast<int>(divisor - 1));
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }
  __device__ int operator()(int x) const {
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(static_cast<uint32_t>(x)) * multiplier) >> 32);
    return static_cast<int>((high + static_cast<uint32_t>(x)) >> shift);
  }
};

// The rows [first_row, first_row + num_rows) of one request, and the tile of a block. request < 0: none; tile then
// counts from the end of all tiles.
struct RequestTile {
  int request, tile, first_row, num_rows;
};

// By a whole warp. The tiles of request b are ceil(rows * group / tile_rows); they follow each other in order of b.
__device__ inline RequestTile find_tile(const int32_t* cu_q_lens, int batch_size, int num_rows, int group,
                                        int tile_rows, int tile) {
  const int lane = threadIdx.x % kWarpSize;
  for (int base = 0; base < batch_size; base += kWarpSize) {
    const int b = base + lane;
    int begin = 0, count = 0;
    if (b < batch_size) {
      begin = clamp(cu_q_lens[b], 0, num_rows);
      count = clamp(cu_q_lens[b + 1], begin, num_rows) - begin;
    }
    const int tiles = ceil_div(count * group, tile_rows);
    int end = tiles;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, end, offset);
      if (lane >= offset) end += other;
    }
    const unsigned behind = __ballot_sync(kFullMask, tile < end);
    if (behind != 0) {
      const int owner = __ffs(behind) - 1;
      return {base + owner, tile - __shfl_sync(kFullMask, end - tiles, owner), __shfl_sync(kFullMask, begin, owner),
              __shfl_sync(kFullMask, count, owner)};
    }
    tile -= __shfl_sync(kFullMask, end, kWarpSize - 1);
  }
  return {-1, tile, 0, 0};
}

// How a head size is tiled: kRowWarps x kKvWarps warps, a warp owns 16 packed rows and kTileTokens / kKvWarps
// positions.
template <typename Kv, int kHeadDimension, int kTile>
struct Tiling {
  static constexpr int kHeadDim = kHeadDimension, kTileRows = kTile;
  static constexpr bool kIsFp8 = sizeof(Kv) == 1;
  static constexpr int kTileTokens = kHeadDim > 128 ? 32 : 64;
  static constexpr int kRowWarps = kTileRows / 16;
  static constexpr int kKvWarps = kRowWarps > 1 ? 1 : kTileTokens / 16;
  static constexpr int kNumThreads = kRowWarps * kKvWarps * kWarpSize;
  static constexpr int kWarpTokens = kTileTokens / kKvWarps;
  // Blocks per SM: three keep enough copies in flight. With larger heads the registers allow fewer.
  static constexpr int kMinBlocks = kHeadDim * kTileRows < 96 * 64 ? 3 : 1;
  // Padded by 16 bytes, so that the eight rows that ldmatrix reads are in different banks.
  static constexpr int kStride = kHeadDim + 8;
  static constexpr int kTileBytes = kTileTokens * kStride * 2;
  static constexpr int kSlotBytes = kIsFp8 ? kTileTokens * kHeadDim : kTileBytes;
  static constexpr int kConvertedBytes = kIsFp8 ? kTileBytes : 0;
  static constexpr int kNumSlots = kConvertedBytes + 3 * kSlotBytes <= 36 * 1024 ? 3 : 2;
  static constexpr int kPoolBytes = kConvertedBytes + kNumSlots * kSlotBytes;
  static_assert(kHeadDim % 16 == 0 && (kStride / 8) % 2 == 1);
  static_assert(kKvWarps == 1 || kKvWarps * 16 * kHeadDim * 4 <= kPoolBytes, "the merge of warps fits the pool");
};

// Addresses of a tile's K and V. Positions outside [kv_begin, kv_end) and those in blocks that do not exist read as
// zeros.
template <typename Kv, typename Tiles>
struct KvReader {
  const int32_t* blocks;
  const FastDivision by_block;
  int tokens_per_block, num_blocks, kv_begin, kv_end;
  int64_t block_stride, head_offset;

  // Start copying kTileTokens positions from `first` on into a slot.
  __device__ void copy(const Kv* cache, int first, char* slot) const {
    constexpr int kChunkValues = 16 / sizeof(Kv), kChunks = Tiles::kHeadDim / kChunkValues;
    constexpr int kRowBytes = Tiles::kIsFp8 ? Tiles::kHeadDim : Tiles::kStride * 2;
#pragma unroll
    for (int i = 0; i < ceil_div(Tiles::kTileTokens * kChunks, Tiles::kNumThreads); i++) {
      const int index = static_cast<int>(threadIdx.x) + i * Tiles::kNumThreads;
      const int token = index / kChunks, chunk = index % kChunks, position = first + token;
      if (Tiles::kTileTokens * kChunks % Tiles::kNumThreads != 0 && token >= Tiles::kTileTokens) break;
      const Kv* source = cache;
      bool valid = position >= kv_begin && position < kv_end;
      if (valid) {
        const int slot_of_request = by_block(position);
        const int block = __ldg(blocks + slot_of_request);
        valid = block >= 0 && block < num_blocks;
        const int offset = position - slot_of_request * tokens_per_block;
        if (valid) {
          source = cache + block * block_stride + head_offset + static_cast<int64_t>(offset) * Tiles::kHeadDim +
                   chunk * kChunkValues;
        }
      }
      cp_async_16(slot + token * kRowBytes + chunk * 16, source, valid);
    }
  }
};

// Converts a tile of e4m3 to T, in rows of kStride values.
template <typename T, typename Tiles>
__device__ inline void convert_tile(const char* slot, T* converted) {
  constexpr int kWords = Tiles::kTileTokens * Tiles::kHeadDim / 4;
#pragma unroll 4
  for (int index = static_cast<int>(threadIdx.x); index < kWords; index += Tiles::kNumThreads) {
    const int token = index / (Tiles::kHeadDim / 4), column = index % (Tiles::kHeadDim / 4) * 4;
    e4m3 values[4];
    *reinterpret_cast<uint32_t*>(values) = *reinterpret_cast<const uint32_t*>(slot + index * 4);
    uint2 pairs;
    pairs.x = pack2<T>(to_float(values[0]), to_float(values[1]));
    pairs.y = pack2<T>(to_float(values[2]), to_float(values[3]));
    *reinterpret_cast<uint2*>(converted + token * Tiles::kStride + column) = pairs;
  }
}

// Writes results of (row, head): T [num_rows, num_heads, head_dim] without splits; with them float partial results
// [num_splits, num_rows, num_heads, head_dim] and, behind these, log2 sums [num_splits, num_rows, num_heads].
template <typename T, int kHeadDim>
struct ResultWriter {
  const AttentionArguments& args;
  int split;

  __device__ int64_t item(int row, int head) const {
    return (static_cast<int64_t>(split) * args.num_rows + row) * args.num_heads + head;
  }
  __device__ bool is_partial() const { return args.num_splits > 1; }
  __device__ void pair(int row, int head, int column, float low, float high) const {
    const int64_t at = item(row, head) * kHeadDim + column;
    if (is_partial()) {
      *reinterpret_cast<float2*>(static_cast<float*>(args.out) + at) = make_float2(low, high);
    } else {
      *reinterpret_cast<uint32_t*>(static_cast<T*>(args.out) + at) = pack2<T>(low, high);
    }
  }
  // log2 of the sum of exponentials; -inf: nothing was visible, and the partial result need not be written.
  __device__ void log2_sum(int row, int head, float value) const {
    if (!is_partial()) return;
    const int64_t num_items = static_cast<int64_t>(args.num_splits) * args.num_rows * args.num_heads;
    static_cast<float*>(args.out)[num_items * kHeadDim + item(row, head)] = value;
  }
};

// Zeroes rows after the last request's: dummies of a bucket, which later ops must be able to read.
template <typename Tiles, typename Writer>
__device__ void fill_rows_of_nobody(const AttentionArguments& args, const Writer& writer, int group, int part,
                                    int num_parts) {
  const int first = args.batch_size > 0 ? clamp(args.cu_q_lens[args.batch_size], 0, args.num_rows) : 0;
  const int num_items = (args.num_rows - first) * group;
  for (int item = part; item < num_items; item += num_parts) {
    const int row = first + item / group, head = static_cast<int>(blockIdx.y) * group + item % group;
    if (writer.is_partial()) {
      if (threadIdx.x == 0) writer.log2_sum(row, head, -INFINITY);
    } else {
      for (int column = 2 * threadIdx.x; column < Tiles::kHeadDim; column += 2 * Tiles::kNumThreads) {
        writer.pair(row, head, column, 0.0f, 0.0f);
      }
    }
  }
}

template <typename T, typename Kv, typename Tiles>
__device__ void attend(const AttentionArguments& args) {
  constexpr int kHeadDim = Tiles::kHeadDim, kStride = Tiles::kStride, kNumSlots = Tiles::kNumSlots;
  constexpr int kKSteps = kHeadDim / 16, kScoreTiles = Tiles::kWarpTokens / 8;
  __shared__ __align__(16) char pool[Tiles::kPoolBytes];

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int row_warp = warp % Tiles::kRowWarps, kv_warp = warp / Tiles::kRowWarps;
  const int kv_head = blockIdx.y, split = blockIdx.z, group = args.num_heads / args.num_kv_heads;
  const ResultWriter<T, kHeadDim> writer{args, split};

  const RequestTile mine =
      find_tile(args.cu_q_lens, args.batch_size, args.num_rows, group, Tiles::kTileRows, blockIdx.x);
  if (mine.request < 0) {
    fill_rows_of_nobody<Tiles>(args, writer, group, mine.tile, mine.tile + gridDim.x - blockIdx.x);
    return;
  }

  // Positions visible to the tile's rows: row i of the request sees positions up to past + i, within the window.
  const int past = clamp(args.kv_lens[mine.request], 0, kMaxPositions) - mine.num_rows;
  const int64_t table_tokens = static_cast<int64_t>(args.max_blocks_per_seq) * args.tokens_per_block;
  const int capacity = static_cast<int>(table_tokens < kMaxPositions ? table_tokens : kMaxPositions);
  const int num_packed = mine.num_rows * group, first_packed = mine.tile * Tiles::kTileRows;
  const int last_packed = clamp(first_packed + Tiles::kTileRows - 1, 0, num_packed - 1);
  const int kv_end = clamp(past + last_packed / group + 1, 0, capacity);
  const int kv_begin = args.window > 0 ? clamp(past + first_packed / group + 1 - args.window, 0, kv_end) : 0;

  const int begin_of_all = kv_begin / Tiles::kTileTokens;
  const int end_of_all = ceil_div(kv_end, Tiles::kTileTokens);
  const int tiles_per_split = ceil_div(end_of_all - begin_of_all, args.num_splits);
  const int first_tile = begin_of_all + split * tiles_per_split;
  const int num_tiles = clamp(end_of_all - first_tile, 0, tiles_per_split);

  const KvReader<Kv, Tiles> reader{args.block_table + static_cast<int64_t>(mine.request) * args.max_blocks_per_seq,
                                   FastDivision(args.tokens_per_block),
                                   args.tokens_per_block,
                                   args.num_blocks,
                                   kv_begin,
                                   kv_end,
                                   static_cast<int64_t>(args.num_kv_heads) * args.tokens_per_block * kHeadDim,
                                   static_cast<int64_t>(kv_head) * args.tokens_per_block * kHeadDim};
  // Halves are K and V of a tile in turn; half h goes to slot h mod kNumSlots. Past the end an empty group is
  // committed, so that the number of groups in flight is constant.
  auto fetch = [&](int half) {
    if (half < 2 * num_tiles) {
      const Kv* cache = static_cast<const Kv*>(half % 2 == 0 ? args.k_cache : args.v_cache);
      reader.copy(cache, (first_tile + half / 2) * Tiles::kTileTokens,
                  pool + Tiles::kConvertedBytes + half % kNumSlots * Tiles::kSlotBytes);
    }
    cp_async_commit();
  };
  // The half h in T, for all warps; and the fetch of the half that takes the slot freed by half h - 1.
  auto arrive = [&](int half) -> const T* {
    cp_async_wait<kNumSlots - 2>();
    __syncthreads();
    fetch(half + kNumSlots - 1);
    char* slot = pool + Tiles::kConvertedBytes + half % kNumSlots * Tiles::kSlotBytes;
    if constexpr (Tiles::kIsFp8) {
      convert_tile<T, Tiles>(slot, reinterpret_cast<T*>(pool));
      __syncthreads();
      slot = pool;
    }
    return reinterpret_cast<const T*>(slot);
  };
#pragma unroll
  for (int half = 0; half < kNumSlots - 1; half++) fetch(half);

  // This lane's two rows of the tile: lane / 4 and 8 rows further.
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
  // Every row of the warp sees [all_from, all_to) without a mask.
  const int warp_first = (first_packed + row_warp * 16) / group;
  const int warp_last = clamp(first_packed + row_warp * 16 + 15, 0, num_packed - 1) / group;
  const int all_to = past + warp_first + 1, all_from = args.window > 0 ? past + warp_last + 1 - args.window : 0;
  const int none_from = past + warp_last + 1;

  for (int t = 0; t < num_tiles; t++) {
    const int first = (first_tile + t) * Tiles::kTileTokens + kv_warp * Tiles::kWarpTokens;
    const bool computes = warp_has_rows && first < none_from && first < kv_end;
    uint32_t weights[kScoreTiles / 2][4];

    const T* keys = arrive(2 * t);
    if (computes) {
      float score[kScoreTiles][4] = {};
      const T* key = keys + (kv_warp * Tiles::kWarpTokens + lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
      for (int k = 0; k < kKSteps; k++) {
#pragma unroll
        for (int n = 0; n < kScoreTiles / 2; n++) {
          uint32_t b[4];
          ldmatrix_x4(b, key + n * 16 * kStride + k * 16);
          mma_m16n8k16<T>(score[2 * n], q[k], b[0], b[1]);
          mma_m16n8k16<T>(score[2 * n + 1], q[k], b[2], b[3]);
        }
      }
      if (first < all_from || first + Tiles::kWarpTokens > all_to || first + Tiles::kWarpTokens > kv_end) {
#pragma unroll
        for (int n = 0; n < kScoreTiles; n++) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int position = first + 8 * n + 2 * (lane % 4) + i % 2, last = limit[i / 2];
            const bool in_window = args.window <= 0 || position > last - args.window;
            if (position > last || position >= kv_end || !in_window) score[n][i] = -INFINITY;
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
      const T* value = values + (kv_warp * Tiles::kWarpTokens + lane % 16) * kStride + lane / 16 * 8;
#pragma unroll
      for (int n = 0; n < kScoreTiles / 2; n++) {
#pragma unroll
        for (int k = 0; k < kKSteps; k++) {
          uint32_t b[4];
          ldmatrix_x4_trans(b, value + n * 16 * kStride + k * 16);
          mma_m16n8k16<T>(out[2 * k], weights[n], b[0], b[1]);
          mma_m16n8k16<T>(out[2 * k + 1], weights[n], b[2], b[3]);
        }
      }
    }
  }
  cp_async_wait<0>();

#pragma unroll
  for (int i = 0; i < 2; i++) {
    sum[i] += __shfl_xor_sync(kFullMask, sum[i], 1);
    sum[i] += __shfl_xor_sync(kFullMask, sum[i], 2);
  }
  if constexpr (Tiles::kKvWarps == 1) {
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
    __shared__ float tops[Tiles::kKvWarps][16], sums[Tiles::kKvWarps][16];
    float* partial = reinterpret_cast<float*>(pool);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = lane / 4 + 8 * i;
      if (lane % 4 == 0) {
        tops[kv_warp][r] = top[i];
        sums[kv_warp][r] = sum[i];
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
      for (int w = 0; w < Tiles::kKvWarps; w++) highest = fmaxf(highest, tops[w][r]);
      const float shift = highest == -INFINITY ? 0.0f : highest * scale;
#pragma unroll
      for (int w = 0; w < Tiles::kKvWarps; w++) {
        weight[w] = exp2_approx(tops[w][r] * scale - shift);
        total += sums[w][r] * weight[w];
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

// One warp per (row, head).
template <typename T>
__device__ void combine(const float* partial, int num_rows, int num_heads, int head_dim, int num_splits, T* out) {
  const int64_t num_items = static_cast<int64_t>(num_rows) * num_heads;
  const int64_t item =
      static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpSize) + static_cast<int64_t>(threadIdx.x / kWarpSize);
  if (item >= num_items) return;
  const float* log2_sums = partial + num_splits * num_items * head_dim;
  float highest = -INFINITY, total = 0.0f;
  for (int s = 0; s < num_splits; s++) highest = fmaxf(highest, log2_sums[s * num_items + item]);
  for (int s = 0; s < num_splits && highest > -INFINITY; s++) {
    total += exp2_approx(log2_sums[s * num_items + item] - highest);
  }
  const float normalise = total > 0.0f ? 1.0f / total : 0.0f;
  for (int column = 2 * (threadIdx.x % kWarpSize); column < head_dim; column += 2 * kWarpSize) {
    float low = 0.0f, high = 0.0f;
    for (int s = 0; s < num_splits; s++) {
      const float log2_sum = log2_sums[s * num_items + item];
      if (log2_sum == -INFINITY) continue;
      const float weight = exp2_approx(log2_sum - highest);
      const float2 pair = *reinterpret_cast<const float2*>(partial + (s * num_items + item) * head_dim + column);
      low += pair.x * weight;
      high += pair.y * weight;
    }
    *reinterpret_cast<uint32_t*>(out + item * head_dim + column) = pack2<T>(low * normalise, high * normalise);
  }
}

}  // namespace faser

// Grid (tiles, num_kv_heads, num_splits) with tiles = (num_rows * group + min(num_rows, batch_size) * (tile_rows - 1))
// / tile_rows + 1, at least one more than there can be. scale_bits: the softmax scale times that of an e4m3 K.
#define FASER_VERIFY_ATTENTION(NAME, T, KV, HEAD_DIM, TILE_ROWS)                                                     \
  extern "C" __global__ void __launch_bounds__(faser::Tiling<KV, HEAD_DIM, TILE_ROWS>::kNumThreads,                  \
                                               faser::Tiling<KV, HEAD_DIM, TILE_ROWS>::kMinBlocks)                   \
      verify_attention_##NAME##_h##HEAD_DIM##_m##TILE_ROWS(                                                          \
          const void* q, const void* k_cache, const void* v_cache, const int32_t* block_table,                       \
          const int32_t* cu_q_lens, const int32_t* kv_lens, int32_t num_rows, int32_t batch_size, int32_t num_heads, \
          int32_t num_kv_heads, int32_t num_blocks, int32_t tokens_per_block, int32_t max_blocks_per_seq,            \
          int32_t window, int32_t num_splits, int32_t scale_bits, int32_t v_scale_bits, void* out) {                 \
    const faser::AttentionArguments args = {q,                                                                       \
                                            k_cache,                                                                 \
                                            v_cache,                                                                 \
                                            block_table,                                                             \
                                            cu_q_lens,                                                               \
                                            kv_lens,                                                                 \
                                            num_rows,                                                                \
                                            batch_size,                                                              \
                                            num_heads,                                                               \
                                            num_kv_heads,                                                            \
                                            num_blocks,                                                              \
                                            tokens_per_block,                                                        \
                                            max_blocks_per_seq,                                                      \
                                            window,                                                                  \
                                            num_splits,                                                              \
                                            faser::float_of_bits(scale_bits),                                        \
                                            faser::float_of_bits(v_scale_bits),                                      \
                                            out};                                                                    \
    faser::attend<T, KV, faser::Tiling<KV, HEAD_DIM, TILE_ROWS>>(args);                                              \
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

// Grid (ceil(num_rows * num_heads / 4)), blocks of 128 threads.
#define FASER_VERIFY_ATTENTION_COMBINE(NAME, T)                                                                  \
  extern "C" __global__ void __launch_bounds__(128) verify_attention_combine_##NAME(                             \
      const float* partial, int32_t num_rows, int32_t num_heads, int32_t head_dim, int32_t num_splits, T* out) { \
    faser::combine<T>(partial, num_rows, num_heads, head_dim, num_splits, out);                                  \
  }
FASER_VERIFY_ATTENTION_COMBINE(bf16, faser::bf16)
FASER_VERIFY_ATTENTION_COMBINE(fp16, faser::fp16)
