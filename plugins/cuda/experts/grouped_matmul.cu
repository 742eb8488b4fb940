// Products of rows that are sorted by group, each group's with a matrix of its own: out = x times weights[group]^T. A
// row's bits are those of matmul with its group's matrix, so they depend neither on the other rows nor on their number.
//
// Blocks find their group on the device, so the host needs the number of rows alone. Bound: each matrix of a group that
// has rows is read once, num_outs * width * 2 bytes, or for many rows as in matmul. Speed: not measured.
//
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
    const faser::bf16* weight = weights + static_cast<int64_t>(mine.group) * num_outs * width;                         \
    faser::multiply<faser::bf16, faser::bf16, Tile>(x, weight, nullptr, nullptr, mine.first, mine.end, num_outs,       \
                                                    width, out);                                                       \
  }
FASER_GROUPED_MATMUL(16)
FASER_GROUPED_MATMUL(64)
FASER_GROUPED_MATMUL(128)
