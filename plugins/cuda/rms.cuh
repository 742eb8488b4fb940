// The scale of RMSNorm, applied after a row's product with a matrix: (x / rms(x)) W = (x W) / rms(x), so that no kernel
// has to write normalized rows.
#ifndef FASER_CUDA_RMS_CUH_
#define FASER_CUDA_RMS_CUH_

#include <cstdint>

#include "common.cuh"

namespace faser {

// Eight entries of a row as floats. source must be aligned to 16 bytes.
template <typename T>
__device__ inline void load_vector(const T* source, float values[8]) {
  alignas(16) T raw[8];
  static_assert(sizeof raw == 16, "one load");
  *reinterpret_cast<uint4*>(raw) = *reinterpret_cast<const uint4*>(source);
#pragma unroll
  for (int i = 0; i < 8; i++) values[i] = to_float(raw[i]);
}

__device__ inline void load_vector(const float* source, float values[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 part = *reinterpret_cast<const float4*>(source + i);
    values[i] = part.x;
    values[i + 1] = part.y;
    values[i + 2] = part.z;
    values[i + 3] = part.w;
  }
}

__device__ inline float inverse_root(float squares, int32_t size, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(size) + eps);
}

// Returns 1 / rms of a row [size], size a multiple of 8, to every thread. The order of the sum depends on kThreads and
// not on other rows. All kThreads threads of the block must call it.
template <int kThreads, typename T>
__device__ float inverse_rms(const T* row, int32_t size, float eps) {
  __shared__ float warp_squares[kThreads / kWarpSize];
  float squares = 0.0f;
  for (int32_t i = static_cast<int32_t>(threadIdx.x) * 8; i < size; i += kThreads * 8) {
    float values[8];
    load_vector(row + i, values);
#pragma unroll
    for (int j = 0; j < 8; j++) squares += values[j] * values[j];
  }
  squares = warp_sum(squares);
  if (threadIdx.x % kWarpSize == 0) warp_squares[threadIdx.x / kWarpSize] = squares;
  __syncthreads();
  squares = 0.0f;
  for (int warp = 0; warp < kThreads / kWarpSize; warp++) squares += warp_squares[warp];
  return inverse_root(squares, size, eps);
}

}  // namespace faser

#endif  // FASER_CUDA_RMS_CUH_
