// Code that the kernels share: conversions, warp reductions, and wrappers of PTX instructions.
//
// Conventions of every kernel: extern "C"; arguments are input pointers, then int32 scalars, then output pointers (the
// order of a TensorRT ahead-of-time plugin; a float travels as the int32 of its bits); at most 48 KB of static shared
// memory and none dynamic; every index loaded from memory is checked, since builders run plugins on arbitrary data.
//
// With a host compiler, the PTX wrappers come from the emulator of tests/ops/cuda, which runs the kernels on the CPU.
#ifndef FASER_CUDA_COMMON_CUH_
#define FASER_CUDA_COMMON_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#ifndef __CUDACC__
#include "cuda_emulator.h"
#endif

namespace faser {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using e4m3 = __nv_fp8_e4m3;

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// More than any model has; larger counts in device memory are invalid, and the sum of two valid ones does not overflow.
constexpr int kMaxPositions = 1 << 30;

__host__ __device__ inline int clamp(int value, int low, int high) {
  return value < low ? low : (value > high ? high : value);
}

__host__ __device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

__host__ __device__ inline float float_of_bits(int32_t bits) {
#ifdef __CUDA_ARCH__
  return __int_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

__host__ __device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
__host__ __device__ inline float to_float(fp16 x) { return __half2float(x); }
__host__ __device__ inline float to_float(float x) { return x; }
__host__ __device__ inline float to_float(e4m3 x) { return static_cast<float>(x); }

// Round to nearest even; e4m3 saturates at +-448.
template <typename T>
__host__ __device__ inline T from_float(float x);
template <>
__host__ __device__ inline bf16 from_float<bf16>(float x) {
  return __float2bfloat16(x);
}
template <>
__host__ __device__ inline fp16 from_float<fp16>(float x) {
  return __float2half(x);
}
template <>
__host__ __device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__host__ __device__ inline e4m3 from_float<e4m3>(float x) {
  return e4m3(x);
}

// Two values in one register, the first in the low half.
template <typename T>
__host__ __device__ inline uint32_t pack2(float low, float high) {
  static_assert(sizeof(T) == 2, "two values of 16 bits");
  const T pair[2] = {from_float<T>(low), from_float<T>(high)};
  uint32_t bits;
  __builtin_memcpy(&bits, pair, sizeof bits);
  return bits;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullMask, x, offset);
  return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kFullMask, x, offset));
  return x;
}

// Returns true in the last of num_blocks blocks to call it, which then sees what the others wrote before. With kByAll
// each thread publishes its own writes; otherwise the first thread publishes all that the block wrote before its last
// __syncthreads(). All threads of the block must call it.
template <bool kByAll>
__device__ bool is_last_block(uint32_t* arrived, int32_t num_blocks) {
  bool is_last = false;
  if (kByAll || threadIdx.x == 0) {
    __threadfence();
    const uint32_t num_each = kByAll ? blockDim.x : 1;
    is_last = atomicAdd(arrived, 1u) + 1 == static_cast<uint32_t>(num_blocks) * num_each;
    if (is_last) __threadfence();
  }
  if (!__syncthreads_or(is_last)) return false;
  if (is_last) *arrived = 0;
  return true;
}

#ifdef __CUDACC__

// 2^x, subnormal results flushed to zero.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Prefetches the cache line of an address of global memory into L2.
__device__ inline void prefetch_line(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// The binary logarithm of a normal number, within 2^-22 of it or of 1.
__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copy 16 bytes, both sides aligned to 16, or write 16 zero bytes (then source is not read).
__device__ inline void cp_async_16(void* shared, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most kPending of this thread's newest groups are in flight.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit values; lane 8 m + r gives the address of row r of matrix m (16 bytes, aligned). Lane l
// receives of matrix m the values [l / 4][2 (l % 4) + {0, 1}] in r[m]; transposed: [2 (l % 4) + {0, 1}][l / 4].
__device__ inline void ldmatrix_x4(uint32_t r[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ inline void ldmatrix_x4_trans(uint32_t r[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// d [16][8] fp32 += a [16][16] times b [16][8]. Lane l holds, with g = l / 4 and t = 2 (l % 4):
//   a[0]: [g][t, t+1]  a[1]: [g+8][t, t+1]  a[2]: [g][t+8, t+9]  a[3]: [g+8][t+8, t+9]
//   b[0]: [t, t+1][g]  b[1]: [t+8, t+9][g]
//   d[0, 1]: [g][t, t+1]  d[2, 3]: [g+8][t, t+1]
template <typename T>
__device__ inline void mma_m16n8k16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void mma_m16n8k16<bf16>(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma_m16n8k16<fp16>(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif  // __CUDACC__

}  // namespace faser

#endif  // FASER_CUDA_COMMON_CUH_
