// The distribution of the next token, entry by entry: the same operations in the same order as plugins/cpu, so that
// weights are bitwise equal. Sums are over 64-bit integers (fixed point), so that they do not depend on an order.
#ifndef FASER_CUDA_SAMPLING_PROBS_CUH_
#define FASER_CUDA_SAMPLING_PROBS_CUH_

#include <cstdint>

#include "common.cuh"

namespace faser {

constexpr float kMaxDepth = 72.0f;  // weights at least this many nats below the maximum are 0
constexpr float kLargest = 3.402823466e+38f;
constexpr int kProbabilityShift = 60;  // probabilities are in units of 2^-60

__host__ __device__ inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

__host__ __device__ inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Each rounds once: a compiler may contract a * b + c, but never these.
__host__ __device__ inline float add_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

__host__ __device__ inline float multiply_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

__host__ __device__ inline float divide_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

__host__ __device__ inline uint64_t multiply_high(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// exp(z) for z <= 0 within 2 ulp, 0 below -kMaxDepth.
__host__ __device__ inline float exp_non_positive(float z) {
  if (!(z >= -kMaxDepth)) return 0.0f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = add_rn(multiply_rn(z, 1.44269504f), kRound);
  const float n = add_rn(shifted, -kRound);
  const float r = add_rn(add_rn(z, -multiply_rn(n, 0.693359375f)), -multiply_rn(n, -2.12194440e-4f));
  float poly = 1.9875691500e-4f;
  poly = add_rn(multiply_rn(poly, r), 1.3981999507e-3f);
  poly = add_rn(multiply_rn(poly, r), 8.3334519073e-3f);
  poly = add_rn(multiply_rn(poly, r), 4.1665795894e-2f);
  poly = add_rn(multiply_rn(poly, r), 1.6666665459e-1f);
  poly = add_rn(multiply_rn(poly, r), 5.0000001201e-1f);
  poly = add_rn(add_rn(multiply_rn(poly, multiply_rn(r, r)), r), 1.0f);
  return float_of(bits_of(poly) + (bits_of(shifted) << 23));
}

// The rank of an entry as one number, larger is better: by value, then by lower id. -0 and +0 are equal. No NaN.
__host__ __device__ inline uint64_t rank_of(float x, int32_t id) {
  const uint32_t bits = bits_of(add_rn(x, 0.0f));
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (static_cast<uint64_t>(ordered) << 32) | (0xffffffffu - static_cast<uint32_t>(id));
}

__host__ __device__ inline float value_of_rank(uint64_t rank) {
  const uint32_t ordered = static_cast<uint32_t>(rank >> 32);
  return float_of(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

__host__ __device__ inline int32_t id_of_rank(uint64_t rank) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(rank));
}

// x in [0, 1] in fixed point of 2^-shift, to nearest.
__host__ __device__ inline uint64_t fixed_of(float x, int shift) {
  const float scaled = multiply_rn(x, float_of(static_cast<uint32_t>(127 + shift) << 23));
#ifdef __CUDA_ARCH__
  return __float2ull_rn(scaled);
#else
  return static_cast<uint64_t>(__builtin_nearbyintf(scaled));
#endif
}

// The finest fixed point in which n weights of at most 1 can be added up.
__host__ __device__ inline int weight_shift(int32_t n) {
  int bits = 0;
  while (bits < 31 && (int64_t{1} << bits) < n) ++bits;
  return 62 - bits;
}

// The running mass that top_p asks for: the smallest integer at least top_p * total, and at least 1.
__host__ __device__ inline uint64_t mass_wanted(float top_p, uint64_t total) {
  const double wanted = static_cast<double>(top_p) * static_cast<double>(total);
  uint64_t mass = wanted > 0.0 ? static_cast<uint64_t>(wanted) : 0;
  if (static_cast<double>(mass) < wanted) ++mass;
  return mass < 1 ? 1 : (mass > total ? total : mass);
}

// Of integer masses that add up to total, the one to draw with a uniform number of 53 bits is where the running sum
// first exceeds this: floor(u * total), without rounding.
__host__ __device__ inline uint64_t drawn_mass(uint64_t uniform_bits, uint64_t total) {
  return multiply_high(uniform_bits << 11, total);
}

// A row's distribution: the surviving entries and their weights.
struct RowProbs {
  float max;
  float inv_temperature;
  float floor;   // smaller weights are dropped
  uint64_t cut;  // rank of the last entry kept by top_k and top_p
  float scale;   // probability = weight * scale

  __host__ __device__ float depth(float x) const { return -multiply_rn(add_rn(x, -max), inv_temperature); }

  // The weight of an entry before the floor.
  __host__ __device__ float weight(float x, int32_t id) const {
    if (rank_of(x, id) < cut) return 0.0f;
    return exp_non_positive(-depth(x));
  }

  __host__ __device__ float kept_weight(float x, int32_t id) const {
    const float w = weight(x, id);
    return w < floor ? 0.0f : w;
  }

  __host__ __device__ float probability(float x, int32_t id) const { return multiply_rn(kept_weight(x, id), scale); }
};

__host__ __device__ inline float inverse_temperature(float temperature) {
  const float inverse = divide_rn(1.0f, temperature);
  return inverse < kLargest ? inverse : kLargest;
}

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_PROBS_CUH_
