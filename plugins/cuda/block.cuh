// Block-wide reductions and scans over 64-bit integers, whose results do not depend on the order of additions, and
// loops over a row.
#ifndef FASER_CUDA_BLOCK_CUH_
#define FASER_CUDA_BLOCK_CUH_

#include <cstdint>

#include "common.cuh"

// Threads per block; tests may compile with fewer.
#ifndef FASER_BLOCK_THREADS
#define FASER_BLOCK_THREADS 512
#endif

namespace faser {

constexpr int kThreads = FASER_BLOCK_THREADS;
constexpr int kWarps = kThreads / kWarpSize;
static_assert(kThreads % kWarpSize == 0 && kWarps >= 1, "a block is made of whole warps");

struct Max {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
struct Min {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a < b ? a : b; }
};
struct Sum {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};

template <typename Combine>
__device__ uint64_t warp_reduce(uint64_t value, Combine combine) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = combine(value,
                    static_cast<uint64_t>(__shfl_xor_sync(kFullMask, static_cast<unsigned long long>(value), offset)));
  }
  return value;
}

// Every thread gets the result. As for the functions below, all threads of the block must call it.
template <typename Combine>
__device__ uint64_t block_reduce(uint64_t value, Combine combine) {
  __shared__ uint64_t warp_values[kWarps];
  value = warp_reduce(value, combine);
  if (threadIdx.x % kWarpSize == 0) warp_values[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  value = warp_values[0];
  for (int warp = 1; warp < kWarps; ++warp) value = combine(value, warp_values[warp]);
  __syncthreads();
  return value;
}

// The sum over the preceding threads; total: over all threads.
__device__ inline uint64_t block_exclusive_sum(uint64_t value, uint64_t* total) {
  __shared__ uint64_t warp_sums[kWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  uint64_t inclusive = value;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const uint64_t other = __shfl_up_sync(kFullMask, static_cast<unsigned long long>(inclusive), offset);
    if (lane >= offset) inclusive += other;
  }
  if (lane == kWarpSize - 1) warp_sums[warp] = inclusive;
  __syncthreads();
  uint64_t before = 0, sum = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = sum;
    sum += warp_sums[w];
  }
  __syncthreads();
  *total = sum;
  return before + inclusive - value;
}

// Sixteen bytes of a row.
template <typename T>
struct alignas(16) Pack {
  T entry[16 / sizeof(T)];
};

// x must be aligned to 16 bytes.
template <typename T>
__device__ inline Pack<T> load_pack(const T* x) {
  const uint4 words = *reinterpret_cast<const uint4*>(x);
  Pack<T> pack;
  memcpy(&pack, &words, sizeof pack);
  return pack;
}

__device__ inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// A row of n logits, original or edited (then logits is not read).
template <typename T>
struct Row {
  const T* logits;
  const float* edited;
  int32_t n;

  __device__ float operator[](int32_t i) const { return edited != nullptr ? edited[i] : to_float(logits[i]); }
};

// Calls f(index, value as float) for each entry of a row, distributed over the block in no particular order.
template <typename T, typename F>
__device__ void for_each_entry(const Row<T>& row, F f) {
  constexpr int kPack = 16 / sizeof(T);
  const bool aligned = row.edited == nullptr && is_aligned(row.logits);
  // One loop body for all ways of loading: f may be long.
  for (int32_t first = threadIdx.x * kPack; first < row.n; first += kThreads * kPack) {
    float values[kPack];
    if (aligned && first + kPack <= row.n) {
      const Pack<T> entries = load_pack(row.logits + first);
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[i] = to_float(entries.entry[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[i] = row[first + i < row.n ? first + i : first];
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (first + i < row.n) f(first + i, values[i]);
    }
  }
}

}  // namespace faser

#endif  // FASER_CUDA_BLOCK_CUH_
