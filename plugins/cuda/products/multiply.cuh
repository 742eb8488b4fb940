// Products whose bits do not depend on the number of rows, for a tile of rows that a block computes.
//
// A library chooses a kernel by the number of rows, and so the order of a sum. Here an output is always summed alike:
// its inputs are cut into four slices (matmul_slice), each is summed in ascending order by mma of 16 inputs at a time,
// and the slices' sums are added in order. Tiles differ in which warp does what and in nothing else: outputs are always
// the 16 sides of mma and rows the 8, so all tiles give the same bits, and the host chooses one by speed alone.
//
// Tiles of 16 and 64 rows are for few rows, where the weights have to be read as fast as memory allows: a warp has a
// slice, with copies of its own, and waits for no other warp. In tiles of 128 eight warps share copies, and the slices
// follow each other.
#ifndef FASER_CUDA_PRODUCTS_MULTIPLY_CUH_
#define FASER_CUDA_PRODUCTS_MULTIPLY_CUH_

#include "../common.cuh"

namespace faser {

constexpr int kSlices = 4, kSliceUnit = 64;

// Inputs of a slice. It follows from the width alone.
__device__ inline int matmul_slice(int width) { return ceil_div(width, kSlices * kSliceUnit) * kSliceUnit; }

// A block's kTileRows x kTileOuts outputs. kSliceWarps: slices that are summed at a time, each by one warp; or 1: all
// warps have a part of the tile and sum slice after slice. kStep: inputs per copy.
template <int kRows, int kOuts, int kRowParts, int kOutParts, int kSlicesAtATime, int kInputs, int kCopies>
struct MatmulTile {
  static constexpr int kTileRows = kRows, kTileOuts = kOuts, kRowWarps = kRowParts, kOutWarps = kOutParts;
  static constexpr int kSliceWarps = kSlicesAtATime, kStep = kInputs, kStages = kCopies;
  static constexpr int kSharers = kRowWarps * kOutWarps * kWarpSize;  // threads that share copies
  static constexpr int kNumThreads = kSharers * kSliceWarps;
  static constexpr int kWarpRows = kTileRows / kRowWarps, kWarpOuts = kTileOuts / kOutWarps;
  static constexpr int kChunks = kStep / 8, kRowsPerCopy = kSharers / kChunks;
  static constexpr int kRowBytes = kTileRows * kStep * 2;            // of a stage
  static constexpr int kPassRows = kTileRows < 64 ? kTileRows : 64;  // rows whose sums are in shared memory at a time
  static constexpr int kSumStride = kTileOuts + 4;                   // eight outputs of four rows in different banks
  static constexpr int kSumBytes = kSliceWarps * kPassRows * kSumStride * 4;
  static_assert(kSliceWarps == 1 || (kSliceWarps == kSlices && kSharers == kWarpSize));
  static_assert(kWarpRows % 16 == 0 && kWarpOuts % 16 == 0 && kPassRows % kWarpRows == 0);
  static_assert(kTileRows % kRowsPerCopy == 0 && kTileOuts % kRowsPerCopy == 0 && kSliceUnit % kStep == 0);

  // The offset of the eight values `chunk` of row `row`, such that eight rows are in different banks.
  __device__ static int place(int row, int chunk) {
    return row * kStep + 8 * (chunk ^ (row / (8 / kChunks) % kChunks));
  }
};

// The first input of the slice that a thread's warp begins with.
template <typename Tile>
__device__ inline int first_input(int width) {
  const int warp = threadIdx.x / kWarpSize, first = Tile::kSliceWarps > 1 ? warp * matmul_slice(width) : 0;
  return first < width ? first : width;
}

// Rows [first_row, end_row) of a matrix of this width, of which all sharers copy a part to shared memory.
template <typename T, typename Tile>
struct MatmulReader {
  const T* matrix;
  const int first_row, end_row, width;

  template <int kNumRows>
  __device__ void copy(int first, int end, T* stage) const {
    const int thread = static_cast<int>(threadIdx.x) % Tile::kSharers;
    const int row = thread / Tile::kChunks, chunk = thread % Tile::kChunks, column = first + 8 * chunk;
    const T* source = matrix + static_cast<int64_t>(first_row + row) * width + column;
#pragma unroll
    for (int i = 0; i < kNumRows; i += Tile::kRowsPerCopy) {
      const bool valid = column < end && first_row + row + i < end_row;
      cp_async_16(stage + Tile::place(row + i, chunk), valid ? source + static_cast<int64_t>(i) * width : matrix,
                  valid);
    }
  }
};

// The weights of T of a tile's outputs: copied to a stage, where mma reads them.
template <typename T, typename Tile>
struct MatmulWeights {
  static constexpr int kStageBytes = Tile::kTileOuts * Tile::kStep * 2, kConvertedBytes = 0;
  const MatmulReader<T, Tile> reader;

  __device__ MatmulWeights(const T* weight, int first_out, int num_outs, int width)
      : reader{weight, first_out, num_outs, width} {}
  __device__ void copy(int first, int end, char* stage) {
    reader.template copy<Tile::kTileOuts>(first, end, reinterpret_cast<T*>(stage));
  }
};

// Computes rows [first_row, end_row) of out, as far as the tile reaches, and the outputs of blockIdx.y's tile. Weights:
// MatmulWeights, or what converts a stage to the same layout in memory of its own.
template <typename T, typename Out, typename Tile, typename Weights>
__device__ void multiply(const T* x, Weights outs, const Out* addend, const T* bias, int first_row, int end_row,
                         int num_outs, int width, Out* out) {
  constexpr int kRowTiles = Tile::kWarpRows / 8, kOutTiles = Tile::kWarpOuts / 16;
  constexpr bool kIsSliceByWarp = Tile::kSliceWarps > 1;
  constexpr int kStageBytes = Weights::kStageBytes + Tile::kRowBytes;
  constexpr int kSharedBytes = Tile::kStages * kStageBytes + Weights::kConvertedBytes;  // of a slice's sharers
  constexpr int kCopyBytes = Tile::kSliceWarps * kSharedBytes;
  constexpr int kPoolBytes = kCopyBytes < Tile::kSumBytes ? Tile::kSumBytes : kCopyBytes;
  static_assert(kPoolBytes <= 48 * 1024);
  __shared__ __align__(16) char pool[kPoolBytes];

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int row_warp = warp % Tile::kRowWarps, out_warp = warp / Tile::kRowWarps % Tile::kOutWarps;
  const int first_out = blockIdx.y * Tile::kTileOuts;
  const int slice_size = matmul_slice(width), own_slice = kIsSliceByWarp ? warp : 0;
  const int begin = first_input<Tile>(width);
  const int end = kIsSliceByWarp && begin + slice_size < width ? begin + slice_size : width;
  const int num_steps = ceil_div(end - begin, Tile::kStep);

  const MatmulReader<T, Tile> rows{x, first_row, end_row, width};
  char* const stages = pool + own_slice * kSharedBytes;
  // Step t goes to stage t mod kStages. After the last step empty groups are committed, so that the number of groups in
  // flight is constant, and no copy is in flight once the last step has arrived.
  auto fetch = [&](int step, int stage) {
    if (step < num_steps) {
      char* const to = stages + stage * kStageBytes;
      outs.copy(begin + step * Tile::kStep, end, to);
      rows.template copy<Tile::kTileRows>(begin + step * Tile::kStep, end,
                                          reinterpret_cast<T*>(to + Weights::kStageBytes));
    }
    cp_async_commit();
  };
  auto wait_for_sharers = [] {
    if constexpr (kIsSliceByWarp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };
#pragma unroll
  for (int step = 0; step < Tile::kStages - 1; step++) fetch(step, step);

  float sum[kOutTiles][kRowTiles][4] = {}, total[kOutTiles][kRowTiles][4] = {};
  int stage = 0;
#pragma unroll 1
  for (int step = 0; step < num_steps; step++) {
    cp_async_wait<Tile::kStages - 2>();
    wait_for_sharers();
    fetch(step + Tile::kStages - 1, stage == 0 ? Tile::kStages - 1 : stage - 1);
    char* const copied = stages + stage * kStageBytes;
    const T* weights = reinterpret_cast<const T*>(copied);
    const T* const values = reinterpret_cast<const T*>(copied + Weights::kStageBytes);
    if constexpr (Weights::kConvertedBytes > 0) {
      T* const converted = reinterpret_cast<T*>(stages + Tile::kStages * kStageBytes);
      outs.convert(copied, converted);
      wait_for_sharers();
      weights = converted;
    }
    const int first = begin + step * Tile::kStep;
#pragma unroll
    for (int k = 0; k < Tile::kStep / 16; k++) {
      if (first + 16 * k >= end) break;  // as many mma in every tile
      uint32_t a[kOutTiles][4], b[kRowTiles / 2][4];
#pragma unroll
      for (int o = 0; o < kOutTiles; o++) {
        const int row = out_warp * Tile::kWarpOuts + 16 * o + lane % 16;
        ldmatrix_x4(a[o], weights + Tile::place(row, 2 * k + lane / 16));
      }
#pragma unroll
      for (int r = 0; r < kRowTiles / 2; r++) {
        const int row = row_warp * Tile::kWarpRows + 16 * r + lane / 16 * 8 + lane % 8;
        ldmatrix_x4(b[r], values + Tile::place(row, 2 * k + lane / 8 % 2));
      }
#pragma unroll
      for (int o = 0; o < kOutTiles; o++) {
#pragma unroll
        for (int r = 0; r < kRowTiles; r++)
          mma_m16n8k16<T>(sum[o][r], a[o], b[r / 2][r % 2 * 2], b[r / 2][r % 2 * 2 + 1]);
      }
    }
    if (!kIsSliceByWarp && ((first + Tile::kStep) % slice_size == 0 || step == num_steps - 1)) {
#pragma unroll
      for (int o = 0; o < kOutTiles; o++) {
#pragma unroll
        for (int r = 0; r < kRowTiles; r++) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            total[o][r][i] += sum[o][r][i];
            sum[o][r][i] = 0.0f;
          }
        }
      }
    }
    stage = stage == Tile::kStages - 1 ? 0 : stage + 1;
  }

  // Sums go through the memory of the copies, so that neighboring threads write neighboring outputs.
  float* const sums = reinterpret_cast<float*>(pool);
  const int num_slices = kIsSliceByWarp ? ceil_div(width, slice_size) : 1;
  for (int pass = 0; pass < Tile::kTileRows; pass += Tile::kPassRows) {
    __syncthreads();  // nobody reads the memory any more
    const int row_in_pass = row_warp * Tile::kWarpRows - pass;
    if (row_in_pass >= 0 && row_in_pass < Tile::kPassRows) {
#pragma unroll
      for (int o = 0; o < kOutTiles; o++) {
#pragma unroll
        for (int r = 0; r < kRowTiles; r++) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int row = own_slice * Tile::kPassRows + row_in_pass + 8 * r + 2 * (lane % 4) + i % 2;
            const int column = out_warp * Tile::kWarpOuts + 16 * o + lane / 4 + 8 * (i / 2);
            sums[row * Tile::kSumStride + column] = kIsSliceByWarp ? sum[o][r][i] : total[o][r][i];
          }
        }
      }
    }
    __syncthreads();
    for (int index = threadIdx.x; index < Tile::kPassRows * Tile::kTileOuts; index += Tile::kNumThreads) {
      const int in_pass = index / Tile::kTileOuts, column = index % Tile::kTileOuts;
      const int row = first_row + pass + in_pass, output = first_out + column;
      if (row >= end_row || output >= num_outs) continue;
      float value = 0.0f;
      for (int slice = 0; slice < num_slices; slice++) {
        value += sums[(slice * Tile::kPassRows + in_pass) * Tile::kSumStride + column];
      }
      const int64_t place = static_cast<int64_t>(row) * num_outs + output;
      if (addend != nullptr) value += to_float(addend[place]);
      if (bias != nullptr) value += to_float(bias[output]);
      out[place] = from_float<Out>(value);
    }
  }
}

using MatmulTile16 = MatmulTile<16, 16, 1, 1, kSlices, 64, 3>;
using MatmulTile64 = MatmulTile<64, 32, 1, 1, kSlices, 32, 2>;
using MatmulTile128 = MatmulTile<128, 128, 4, 2, 1, 32, 3>;

}  // namespace faser

#endif  // FASER_CUDA_PRODUCTS_MULTIPLY_CUH_
