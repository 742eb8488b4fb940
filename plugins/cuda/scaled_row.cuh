// A row in e4m3 with one scale. The scale is the smallest power of two that brings the largest number to 448 or less,
// so it scales exactly; each row is quantized independently.
#ifndef FASER_CUDA_SCALED_ROW_CUH_
#define FASER_CUDA_SCALED_ROW_CUH_

#include <cstdint>

#include "common.cuh"

namespace faser {

// A float32 has its exponent above 23 bits of mantissa. 448 is 1.75 x 2^8: a mantissa above 1.75 carries.
constexpr int32_t kCarryBeyond175 = 0x1FFFFF, kEightBinades = 8 << 23, kExponentBits = 0x7F800000;
constexpr int32_t kSmallestScale = 64 << 23;  // 2^-63, for a row of zeros too
constexpr int32_t kOneTwice = 254 << 23;      // minus the bits of a power of two: the bits of its reciprocal

// The bits of the largest absolute value: of non-negative floats, larger ones have larger bits, and NaN has the
// largest.
__device__ inline uint64_t largest_bits(const bf16 (&entries)[8]) {
  uint64_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint64_t bits = static_cast<uint64_t>(__float_as_int(to_float(entries[i])) & 0x7FFFFFFF);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

__device__ inline int32_t scale_bits(int32_t largest) {
  const int32_t bits = largest + (kCarryBeyond175 - kEightBinades);
  return (bits < kSmallestScale ? kSmallestScale : bits) & kExponentBits;
}

// Divides eight entries by a scale, given by its bits, and stores them at an address that is a multiple of 8.
__device__ inline void store_scaled(const bf16 (&entries)[8], int32_t scale, e4m3* values) {
  const float reciprocal = float_of_bits(kOneTwice - scale);
  alignas(8) e4m3 scaled[8];
#pragma unroll
  for (int i = 0; i < 8; i++) scaled[i] = from_float<e4m3>(to_float(entries[i]) * reciprocal);
  *reinterpret_cast<uint2*>(values) = *reinterpret_cast<const uint2*>(scaled);
}

}  // namespace faser

#endif  // FASER_CUDA_SCALED_ROW_CUH_
