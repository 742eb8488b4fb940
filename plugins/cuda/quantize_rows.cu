// Quantises rows to e4m3 with one scale per row, for fp8 GEMMs.
//
// One block per row: find the row's largest number, then divide by the scale. The scale is the smallest power of
// two that brings the largest number to 448 or less, so it scales exactly; each row is quantised independently. Memory
// bound: the row is read twice, the second time from a cache. Speed: not measured.
//
// limits: registers <= 40, spill_bytes <= 0, shared_bytes <= 64
#define FASER_BLOCK_THREADS 256
#include "block.cuh"

namespace faser {

// A float32 has its exponent over 23 bits of mantissa. 448 is 1.75 x 2^8: a mantissa beyond 1.75 carries.
constexpr int32_t kCarryBeyond175 = 0x1FFFFF, kEightBinades = 8 << 23, kExponentBits = 0x7F800000;
constexpr int32_t kSmallestScale = 64 << 23;  // 2^-63, for a row of zeros too
constexpr int32_t kOneTwice = 254 << 23;      // less the bits of a power of two: the bits of its reciprocal

__device__ inline int32_t scale_bits(int32_t largest_bits) {
  const int32_t bits = largest_bits + (kCarryBeyond175 - kEightBinades);
  return (bits < kSmallestScale ? kSmallestScale : bits) & kExponentBits;
}

}  // namespace faser

// x [num_rows, width], width a multiple of 16 and rows at multiples of 16 bytes -> values [num_rows, width], scales
// [num_rows].
extern "C" __global__ void __launch_bounds__(faser::kThreads)
    quantize_rows(const faser::bf16* x, int32_t num_rows, int32_t width, faser::e4m3* values, float* scales) {
  const int32_t row = blockIdx.x;
  if (row >= num_rows) return;
  const int64_t start = static_cast<int64_t>(row) * width;
  const int32_t stride = faser::kThreads * 8;
  uint64_t largest = 0;
  for (int32_t i = static_cast<int32_t>(threadIdx.x) * 8; i < width; i += stride) {
    const auto pack = faser::load_pack(x + start + i);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      // For non-negative floats larger numbers have larger bits, and NaN has the largest.
      const uint64_t bits = static_cast<uint64_t>(__float_as_int(faser::to_float(pack.entry[j])) & 0x7FFFFFFF);
      largest = bits > largest ? bits : largest;
    }
  }
  largest = faser::block_reduce(largest, faser::Max());
  const int32_t scale = faser::scale_bits(static_cast<int32_t>(largest));
  const float reciprocal = faser::float_of_bits(faser::kOneTwice - scale);
  for (int32_t i = static_cast<int32_t>(threadIdx.x) * 8; i < width; i += stride) {
    const auto pack = faser::load_pack(x + start + i);
    alignas(8) faser::e4m3 scaled[8];
#pragma unroll
    for (int j = 0; j < 8; j++) scaled[j] = faser::from_float<faser::e4m3>(faser::to_float(pack.entry[j]) * reciprocal);
    *reinterpret_cast<uint2*>(values + start + i) = *reinterpret_cast<const uint2*>(scaled);
  }
  if (threadIdx.x == 0) scales[row] = faser::float_of_bits(scale);
}
