// Tile sizes for each head size, and copies of K and V tiles to shared memory.
#ifndef FASER_CUDA_ATTENTION_TILING_CUH_
#define FASER_CUDA_ATTENTION_TILING_CUH_

#include "../common.cuh"

namespace faser {

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

// Tile sizes for a head size. In a tile of 64 rows, each warp has 16 packed rows, and all warps read the same
// positions. In a tile of 16 rows, each warp has all rows and 16 of the kTileTokens positions; it copies those itself
// and waits for no other warp.
template <typename Kv, int kHeadDimension, int kTile>
struct Tiling {
  static constexpr int kHeadDim = kHeadDimension, kTileRows = kTile;
  static constexpr bool kIsFp8 = sizeof(Kv) == 1, kByPositions = kTileRows == 16;
  static constexpr int kTileTokens = kHeadDim > 128 ? 32 : 64;
  static constexpr int kRowWarps = kTileRows / 16;
  static constexpr int kKvWarps = kByPositions ? kTileTokens / 16 : 1;
  static constexpr int kNumThreads = kRowWarps * kKvWarps * kWarpSize;
  static constexpr int kWarpTokens = kTileTokens / kKvWarps;
  static constexpr int kCopyThreads = kByPositions ? kWarpSize : kNumThreads;
  // Blocks per SM. Three keep enough copies in flight; with larger heads the registers allow fewer.
  static constexpr int kMinBlocks = kHeadDim * kTileRows < 96 * 64 ? 3 : 1;
  // The eight rows that ldmatrix reads are in different banks: the row number permutes the 16-byte chunks of a row
  // where that stays within 128 bytes; otherwise rows are padded by 16 bytes.
  static constexpr bool kIsSwizzled = kHeadDim % 64 == 0;
  static constexpr int kStride = kIsSwizzled ? kHeadDim : kHeadDim + 8;
  static constexpr int kTileBytes = kWarpTokens * kStride * 2;
  static constexpr int kSlotBytes = kIsFp8 ? kWarpTokens * kHeadDim : kTileBytes;
  static constexpr int kConvertedBytes = kIsFp8 ? kTileBytes : 0;
  // Slots in a warp's share of 48 KB, or in all of it if the warps share copies. More than six halves of a tile (its K
  // or its V) in flight gain nothing.
  static constexpr int kSlotsThatFit = (48 * 1024 / kKvWarps - kConvertedBytes) / kSlotBytes;
  static constexpr int kNumSlots = kSlotsThatFit < 6 ? kSlotsThatFit : 6;
  static constexpr int kCopyBytes = kConvertedBytes + kNumSlots * kSlotBytes;
  static constexpr int kMergeFloats = kKvWarps * 16 * (kHeadDim + 2);
  static constexpr int kPoolBytes =
      kKvWarps * kCopyBytes < kMergeFloats * 4 && kByPositions ? kMergeFloats * 4 : kKvWarps * kCopyBytes;
  static_assert(kHeadDim % 16 == 0 && kNumSlots >= 2 && kPoolBytes <= 48 * 1024);
  static_assert(kIsSwizzled || (kStride / 8) % 2 == 1);

  // The offset of the eight values `chunk` of row `row`, in values from the start of the row.
  __device__ static int place(int row, int chunk) { return 8 * (kIsSwizzled ? chunk ^ (row % 8) : chunk); }
};

// Copies K or V of a tile from the paged cache. Positions outside [kv_begin, kv_end) and positions in blocks that do
// not exist read as zeros.
template <typename Kv, typename Tiles>
struct KvReader {
  static constexpr int kChunkValues = 16 / sizeof(Kv), kChunks = Tiles::kHeadDim / kChunkValues;
  int thread;
  const int32_t* blocks;
  const FastDivision by_block;
  int tokens_per_block, num_blocks, kv_begin, kv_end;
  int64_t block_stride, head_offset;

  // Starts to copy kWarpTokens positions, of which the first is `first`, a multiple of 16, to a slot. kCopyThreads
  // threads call it. Where blocks have a multiple of 16 positions, 16 of them are looked up at once.
  __device__ void copy(const Kv* cache, int first, char* slot) const {
    constexpr int kStepTokens = Tiles::kCopyThreads / kChunks;
    if constexpr (Tiles::kCopyThreads % kChunks == 0 && 16 % kStepTokens == 0) {
      if (tokens_per_block % 16 == 0) {
        const int index = thread % Tiles::kCopyThreads, token = index / kChunks, chunk = index % kChunks;
#pragma unroll
        for (int begin = 0; begin < Tiles::kWarpTokens; begin += 16) {
          const Source source = source_of(cache, first + begin, token, chunk);
#pragma unroll
          for (int i = 0; i < 16; i += kStepTokens) {
            start(source.values + i * Tiles::kHeadDim, source.exists, first, begin + token + i, chunk, slot);
          }
        }
        return;
      }
    }
    constexpr int kSteps = (Tiles::kWarpTokens * kChunks + Tiles::kCopyThreads - 1) / Tiles::kCopyThreads;
    // lookup: the bits of a token's number by which its block is looked up.
    auto step = [&](int i, int lookup) {
      const int index = thread % Tiles::kCopyThreads + i * Tiles::kCopyThreads;
      const int token = index / kChunks, chunk = index % kChunks;
      if (Tiles::kWarpTokens * kChunks % Tiles::kCopyThreads != 0 && token >= Tiles::kWarpTokens) return;
      const Source source = source_of(cache, first + (token & lookup), token & ~lookup, chunk);
      start(source.values, source.exists, first, token, chunk, slot);
    };
    if (tokens_per_block % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kSteps; i++) step(i, ~15);
    } else {
#pragma unroll 1
      for (int i = 0; i < kSteps; i++) step(i, ~0);
    }
  }

  struct Source {
    const Kv* values;
    bool exists;
  };

  // Where the values of a position are, and of `token` positions later in the same block.
  __device__ Source source_of(const Kv* cache, int position, int token, int chunk) const {
    int slot_of_request = 0, block = -1;
    if (position < kv_end) {
      slot_of_request = by_block(position);
      block = __ldg(blocks + slot_of_request);
    }
    if (block < 0 || block >= num_blocks) return {cache, false};
    const int offset = (position - slot_of_request * tokens_per_block + token) * Tiles::kHeadDim + chunk * kChunkValues;
    return {cache + block * block_stride + head_offset + offset, true};
  }

  __device__ void start(const Kv* source, bool exists, int first, int token, int chunk, char* slot) const {
    const bool valid = exists && first + token >= kv_begin && first + token < kv_end;
    const int place = Tiles::kIsFp8 ? token * Tiles::kHeadDim + chunk * 16
                                    : 2 * (token * Tiles::kStride + Tiles::place(token, chunk));
    cp_async_16(slot + place, source, valid);
  }
};

// Converts a slot of e4m3 values to T, in rows of kStride values.
template <typename T, typename Tiles>
__device__ inline void convert_tile(int thread, const char* slot, T* converted) {
  constexpr int kWords = Tiles::kWarpTokens * Tiles::kHeadDim / 4;
#pragma unroll 4
  for (int index = thread % Tiles::kCopyThreads; index < kWords; index += Tiles::kCopyThreads) {
    const int token = index / (Tiles::kHeadDim / 4), column = index % (Tiles::kHeadDim / 4) * 4;
    e4m3 values[4];
    *reinterpret_cast<uint32_t*>(values) = *reinterpret_cast<const uint32_t*>(slot + index * 4);
    uint2 pairs;
    pairs.x = pack2<T>(to_float(values[0]), to_float(values[1]));
    pairs.y = pack2<T>(to_float(values[2]), to_float(values[3]));
    *reinterpret_cast<uint2*>(converted + token * Tiles::kStride + Tiles::place(token, column / 8) + column % 8) =
        pairs;
  }
}

}  // namespace faser

#endif  // FASER_CUDA_ATTENTION_TILING_CUH_
