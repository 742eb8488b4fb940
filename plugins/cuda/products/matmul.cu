// Products of rows with a matrix whose bits do not depend on the number of rows: out = x times weight^T, plus an addend
// and a bias.
//
// Bound: (num_outs * width + num_rows * (width + num_outs)) * 2 bytes over the memory's bandwidth, or for many rows
// 2 * num_rows * num_outs * width operations of the tensor cores. Speed: not measured.
//
// limits of *_m16: registers <= 96, spill_bytes <= 0, shared_bytes <= 49152
// limits of *_m64: registers <= 168, spill_bytes <= 0, shared_bytes <= 49152
// limits: registers <= 255, spill_bytes <= 0, shared_bytes <= 49152
#include "common.cuh"
#include "products/multiply.cuh"

// Grid (ceil(num_rows / tile rows), ceil(num_outs / tile outputs)): blocks that read the same weights run together.
// Inputs: x [num_rows, width], weight [num_outs, width], width a multiple of 8, addresses of 16; addend [num_rows,
// num_outs] or null, which may be out; bias [num_outs] or null. Output: out [num_rows, num_outs].
#define FASER_MATMUL(NAME, T, OUT, TILE_ROWS)                                                                       \
  extern "C" __global__ void __launch_bounds__(faser::MatmulTile##TILE_ROWS::kNumThreads)                           \
      matmul_##NAME##_m##TILE_ROWS(const T* x, const T* weight, const OUT* addend, const T* bias, int32_t num_rows, \
                                   int32_t num_outs, int32_t width, OUT* out) {                                     \
    using Tile = faser::MatmulTile##TILE_ROWS;                                                                      \
    const int first_row = blockIdx.x * Tile::kTileRows, first_out = blockIdx.y * Tile::kTileOuts;                   \
    const faser::MatmulWeights<T, Tile> weights(weight, first_out, num_outs, width);                                \
    faser::multiply<T, OUT, Tile>(x, weights, addend, bias, first_row, num_rows, num_outs, width, out);             \
  }

#define FASER_MATMUL_OF_TYPES(NAME, T, OUT) \
  FASER_MATMUL(NAME, T, OUT, 16)            \
  FASER_MATMUL(NAME, T, OUT, 64)            \
  FASER_MATMUL(NAME, T, OUT, 128)

FASER_MATMUL_OF_TYPES(bf16, faser::bf16, faser::bf16)
FASER_MATMUL_OF_TYPES(bf16_fp32, faser::bf16, float)
FASER_MATMUL_OF_TYPES(fp16, faser::fp16, faser::fp16)
FASER_MATMUL_OF_TYPES(fp16_fp32, faser::fp16, float)
