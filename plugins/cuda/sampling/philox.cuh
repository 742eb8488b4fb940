// Philox4x32-10 (Salmon et al., SC 2011), bit for bit as in plugins/cpu/sampling: each random number is a pure function
// of its purpose, so that a text does not depend on the device.
#ifndef FASER_CUDA_SAMPLING_PHILOX_CUH_
#define FASER_CUDA_SAMPLING_PHILOX_CUH_

#include <cstdint>

namespace faser {

enum RandomStream : uint32_t {
  kGumbelStream = 0,     // seeded: one exponential per (position, token)
  kTestStream = 1,       // sampled: the acceptance test of a draft at a position
  kRecoverStream = 2,    // sampled: the token drawn from the residual at a position
  kBonusStream = 3,      // sampled: the token drawn from the target's distribution at a position
  kDraftStream = 4,      // sampled: draft tokens, by draft counter
  kGumbelLowStream = 5,  // seeded: the low bits of a token's uniform
};

struct PhiloxWords {
  uint32_t word[4];
};

__host__ __device__ inline PhiloxWords philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The 53 bits of a uniform number: it is bits * 2^-53.
__host__ __device__ inline uint64_t uniform_bits(uint64_t key, uint64_t index, RandomStream stream) {
  const PhiloxWords out = philox4x32(static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0,
                                     static_cast<uint32_t>(stream), key);
  return ((static_cast<uint64_t>(out.word[1]) << 32) | out.word[0]) >> 11;
}

// Uniform in [0, 1) with 53 bits.
__host__ __device__ inline double uniform(uint64_t key, uint64_t index, RandomStream stream) {
  return static_cast<double>(uniform_bits(key, index, stream)) * 0x1p-53;
}

// Seeded noise: counter c serves tokens gumbel_token_of(c, 0 .. 3), with words 0 .. 3.
__host__ __device__ inline int32_t gumbel_token_of(int32_t counter, int32_t word) {
  return counter / 16 * 64 + word * 16 + counter % 16;
}

__host__ __device__ inline PhiloxWords gumbel_words(uint64_t key, uint64_t position, int32_t counter) {
  return philox4x32(static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                    static_cast<uint32_t>(counter), kGumbelStream, key);
}

// The full uniform of a token, 52 bits in (0, 1), at least word * 2^-32 and below (word + 1) * 2^-32.
__host__ __device__ inline double gumbel_uniform(uint64_t key, uint64_t position, int32_t token, uint32_t word) {
  const PhiloxWords low = philox4x32(static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                                     static_cast<uint32_t>(token), kGumbelLowStream, key);
  const uint64_t bits = (static_cast<uint64_t>(word) << 20) | (low.word[0] >> 12);
  return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_PHILOX_CUH_
