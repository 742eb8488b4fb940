// How a head size is tiled, and how tiles of K and V come to shared memory.
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

}  // namespace faser

#endif  // FASER_CUDA_ATTENTION_TILING_CUH_
