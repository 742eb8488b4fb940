// Products of rows that are sorted by group, each group's with a matrix of its own: out = x times weights[group]^T. A
// row's bits are those of matmul with its group's matrix, so they depend neither on the other rows nor on their number.
//
// Blocks find their group on the device, so the host needs the number of rows alone. Matrices in MXFP4 are copied as
// they are and converted to bf16 in shared memory, without loss. Bound: each matrix of a group that has rows is read
// once, num_outs * width * 2 bytes (17 / 32 in MXFP4), or for many rows as in matmul. Speed: not measured.
//
// limits of *_mxfp4_m16: registers <= 128, spill_bytes <= 0, shared_bytes <= 49152
// limits of *_mxfp4_m64: registers <= 192, spill_bytes <= 0, shared_bytes <= 49152
// limits of *_m16: registers <= 96, spill_bytes <= 0, shared_bytes <= 49152
// limits of *_m64: registers <= 168, spill_bytes <= 0, shared_bytes <= 49152
// limits: registers <= 255, spill_bytes <= 0, shared_bytes <= 49152
#include "common.cuh"
#include "products/multiply.cuh"

namespace faser {

// Rows [first, end) of a group, of which a block computes a tile; group -1: there is no such tile.
struct GroupTile {
  int group, first, end;
};

// The tile of this number, when the groups' tiles are counted one after the other. All threads of a warp call it.
__device__ inline GroupTile group_tile(const int32_t* ends, int num_groups, int num_rows, int tile_rows, int tile) {
  const int lane = threadIdx.x % kWarpSize;
  int num_before = 0;
  for (int base = 0; base < num_groups; base += kWarpSize) {
    const int group = base + lane;
    const int begin = group > 0 && group < num_groups ? clamp(ends[group - 1], 0, num_rows) : 0;
    const int end = group < num_groups ? clamp(ends[group], begin, num_rows) : begin;
    const int count = ceil_div(end - begin, tile_rows);
    int sum = count;  // of the tiles up to this lane's group
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, sum, offset);
      if (lane >= offset) sum += other;
    }
    const uint32_t votes = __ballot_sync(kFullMask, num_before + sum > tile);
    if (votes != 0) {
      const int owner = __ffs(static_cast<int>(votes)) - 1;
      const int place = tile - num_before - __shfl_sync(kFullMask, sum - count, owner);
      const int first = __shfl_sync(kFullMask, begin, owner) + place * tile_rows;
      return {base + owner, first, __shfl_sync(kFullMask, end, owner)};
    }
    num_before += __shfl_sync(kFullMask, sum, kWarpSize - 1);
  }
  return {-1, 0, 0};
}

// A matrix in MXFP4: of each output, blocks of 32 inputs, each 16 bytes of two e2m1 numbers, the first in the low half,
// and a scale 2^(byte - 127). A thread copies a block and its scale, and converts them.
template <typename Tile>
struct Mxfp4Weights {
  static constexpr int kBlockInputs = 32, kBlocks = Tile::kStep / kBlockInputs;  // of an output in a step
  static constexpr int kItems = Tile::kTileOuts * kBlocks;
  static constexpr int kStageBytes = kItems * 17;
  static constexpr int kConvertedBytes = Tile::kTileOuts * Tile::kStep * 2;
  static_assert(kItems <= Tile::kSharers && kItems % 16 == 0 && Tile::kStep % kBlockInputs == 0);

  const uint8_t *blocks, *scales;
  const int item, end;  // end: of the inputs that this thread copies
  int64_t place;        // of the next block to copy
  uint8_t scale;        // of that block, loaded a step ahead

  __device__ Mxfp4Weights(const uint8_t* blocks, const uint8_t* scales, int first_out, int num_outs, int width,
                          int begin)
      : blocks(blocks),
        scales(scales),
        item(static_cast<int>(threadIdx.x) % Tile::kSharers),
        end(item < kItems && first_out + item / kBlocks < num_outs ? width : 0),
        place((static_cast<int64_t>(first_out + item / kBlocks) * width + begin) / kBlockInputs + item % kBlocks),
        scale(load(begin)) {}

  __device__ bool is_valid(int first) const { return first + item % kBlocks * kBlockInputs < end; }
  __device__ uint8_t load(int first) const { return is_valid(first) ? scales[place] : 0; }

  __device__ void copy(int first, int, char* stage) {
    if (item >= kItems) return;
    cp_async_16(stage + item * 16, is_valid(first) ? blocks + place * 16 : blocks, is_valid(first));
    stage[kItems * 16 + item] = static_cast<char>(scale);
    place += kBlocks;
    scale = load(first + Tile::kStep);
  }

  __device__ void convert(const char* stage, bf16* converted) const {
    if (item >= kItems) return;
    const uint4 block = *reinterpret_cast<const uint4*>(stage + item * 16);
    const int exponent = static_cast<uint8_t>(stage[kItems * 16 + item]);
    const float scale_value = float_of_bits(exponent == 0 ? 1 << 22 : exponent << 23);
    const uint32_t words[4] = {block.x, block.y, block.z, block.w};
#pragma unroll
    for (int chunk = 0; chunk < 4; chunk++) {
      uint4 pairs;
      pairs.x = pair(words[chunk], scale_value);
      pairs.y = pair(words[chunk] >> 8, scale_value);
      pairs.z = pair(words[chunk] >> 16, scale_value);
      pairs.w = pair(words[chunk] >> 24, scale_value);
      *reinterpret_cast<uint4*>(converted + Tile::place(item / kBlocks, item % kBlocks * 4 + chunk)) = pairs;
    }
  }

  __device__ static uint32_t pair(uint32_t codes, float scale) {
    return pack2<bf16>(value(codes) * scale, value(codes >> 4) * scale);
  }
  // e2m1's bits as fp32's: its exponents are smaller by 126, which a multiplication corrects, also for 0.5.
  __device__ static float value(uint32_t code) {
    return float_of_bits(static_cast<int32_t>((code & 7) << 22 | (code & 8) << 28)) * float_of_bits(253 << 23);
  }
};

}  // namespace faser

// Grid (tiles, ceil(num_outs / tile outputs)), of as many tiles as any groups can have: num_rows / tile rows + min(
// num_groups, num_rows). Inputs: x [num_rows, width], weights [num_groups, num_outs, width], width a multiple of 8,
// addresses of 16; ends [num_groups]: the number of rows up to and including a group's, ascending. Output: out
// [num_rows, num_outs], not written after the last group's rows.
#define FASER_GROUPED_MATMUL(TILE_ROWS)                                                                                \
  extern "C" __global__ void __launch_bounds__(faser::MatmulTile##TILE_ROWS::kNumThreads) grouped_matmul_m##TILE_ROWS( \
      const faser::bf16* x, const faser::bf16* weights, const int32_t* ends, int32_t num_rows, int32_t num_groups,     \
      int32_t num_outs, int32_t width, faser::bf16* out) {                                                             \
    using Tile = faser::MatmulTile##TILE_ROWS;                                                                         \
    const auto mine = faser::group_tile(ends, num_groups, num_rows, Tile::kTileRows, static_cast<int>(blockIdx.x));    \
    if (mine.group < 0) return;                                                                                        \
    const faser::MatmulWeights<faser::bf16, Tile> own(weights + static_cast<int64_t>(mine.group) * num_outs * width,   \
                                                      blockIdx.y * Tile::kTileOuts, num_outs, width);                  \
    faser::multiply<faser::bf16, faser::bf16, Tile>(x, own, nullptr, nullptr, mine.first, mine.end, num_outs, width,   \
                                                    out);                                                              \
  }
FASER_GROUPED_MATMUL(16)
FASER_GROUPED_MATMUL(64)
FASER_GROUPED_MATMUL(128)

// The same of weights in MXFP4: blocks [num_groups, num_outs, width / 32, 16] and scales [num_groups, num_outs, width /
// 32] bytes; width is a multiple of 32.
#define FASER_GROUPED_MATMUL_MXFP4(TILE_ROWS)                                                                          \
  extern "C" __global__ void __launch_bounds__(faser::MatmulTile##TILE_ROWS::kNumThreads)                              \
      grouped_matmul_mxfp4_m##TILE_ROWS(const faser::bf16* x, const uint8_t* blocks, const uint8_t* scales,            \
                                        const int32_t* ends, int32_t num_rows, int32_t num_groups, int32_t num_outs,   \
                                        int32_t width, faser::bf16* out) {                                             \
    using Tile = faser::MatmulTile##TILE_ROWS;                                                                         \
    const auto mine = faser::group_tile(ends, num_groups, num_rows, Tile::kTileRows, static_cast<int>(blockIdx.x));    \
    if (mine.group < 0) return;                                                                                        \
    const int64_t first_block = static_cast<int64_t>(mine.group) * num_outs * (width / 32);                            \
    const faser::Mxfp4Weights<Tile> own(blocks + first_block * 16, scales + first_block, blockIdx.y * Tile::kTileOuts, \
                                        num_outs, width, faser::first_input<Tile>(width));                             \
    faser::multiply<faser::bf16, faser::bf16, Tile>(x, own, nullptr, nullptr, mine.first, mine.end, num_outs, width,   \
                                                    out);                                                              \
  }
FASER_GROUPED_MATMUL_MXFP4(16)
FASER_GROUPED_MATMUL_MXFP4(64)
FASER_GROUPED_MATMUL_MXFP4(128)
