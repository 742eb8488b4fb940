// Quantizes rows to e4m3 with one scale per row, for fp8 GEMMs; add_quantize_rows adds a product to the residual first.
//
// One block per row: find the row's largest number, then divide by the scale (scaled_row.cuh). Memory bound: the row is
// read twice, the second time from a cache. Speed: not measured.
//
// limits: registers <= 40, spill_bytes <= 0, shared_bytes <= 64
#define FASER_BLOCK_THREADS 256
#include "block.cuh"
#include "scaled_row.cuh"

namespace faser {

// hidden: null, or the residual, to which x is added in place.
__device__ inline void quantize_row(const bf16* x, bf16* hidden, int32_t width, e4m3* values, float* scales) {
  const int64_t row = blockIdx.x, start = row * width;
  const int32_t stride = kThreads * 8;
  uint64_t largest = 0;
  for (int32_t i = static_cast<int32_t>(threadIdx.x) * 8; i < width; i += stride) {
    Pack<bf16> pack = load_pack(x + start + i);
    if (hidden != nullptr) {
      const Pack<bf16> before = load_pack(hidden + start + i);
#pragma unroll
      for (int j = 0; j < 8; j++) pack.entry[j] = from_float<bf16>(to_float(before.entry[j]) + to_float(pack.entry[j]));
      *reinterpret_cast<uint4*>(hidden + start + i) = *reinterpret_cast<const uint4*>(pack.entry);
    }
    largest = Max()(largest, largest_bits(pack.entry));
  }
  const int32_t scale = scale_bits(static_cast<int32_t>(block_reduce(largest, Max())));
  const bf16* source = hidden != nullptr ? hidden : x;  // each thread reads only what it has read or written itself
  for (int32_t i = static_cast<int32_t>(threadIdx.x) * 8; i < width; i += stride) {
    store_scaled(load_pack(source + start + i).entry, scale, values + start + i);
  }
  if (threadIdx.x == 0) scales[row] = float_of_bits(scale);
}

}  // namespace faser

// Input: x [num_rows, width], width a multiple of 16 and rows at multiples of 16 bytes. Outputs: values [num_rows,
// width], scales [num_rows].
extern "C" __global__ void __launch_bounds__(faser::kThreads)
    quantize_rows(const faser::bf16* x, int32_t num_rows, int32_t width, faser::e4m3* values, float* scales) {
  if (static_cast<int32_t>(blockIdx.x) < num_rows) faser::quantize_row(x, nullptr, width, values, scales);
}

// Adds x to hidden [num_rows, width], rounded to bf16, and quantizes the sums.
extern "C" __global__ void __launch_bounds__(faser::kThreads)
    add_quantize_rows(const faser::bf16* x, int32_t num_rows, int32_t width, faser::bf16* hidden, faser::e4m3* values,
                      float* scales) {
  if (static_cast<int32_t>(blockIdx.x) < num_rows) faser::quantize_row(x, hidden, width, values, scales);
}
