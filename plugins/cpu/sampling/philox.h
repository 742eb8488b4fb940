// Philox4x32-10 (Salmon et al., SC 2011), counter-based random numbers: each number is a pure function of its purpose.
//
// Counter words: [0], [1] a 64-bit index (a position or the draft counter), [2] token group (seeded noise only), [3]
// the stream. The key is the request's. Equal key and counter mean the same number, anywhere.
#ifndef FASER_PHILOX_H_
#define FASER_PHILOX_H_

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

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53, kPhiloxMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9, kPhiloxWeyl1 = 0xBB67AE85;
constexpr int kPhiloxRounds = 10;

inline void philox4x32(const uint32_t counter[4], uint64_t key, uint32_t out[4]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = static_cast<uint64_t>(kPhiloxMultiplier0) * c0;
    const uint64_t b = static_cast<uint64_t>(kPhiloxMultiplier1) * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

// Uniform in [0, 1) with 53 bits.
inline double uniform(uint64_t key, uint64_t index, RandomStream stream) {
  const uint32_t counter[4] = {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0, stream};
  uint32_t words[4];
  philox4x32(counter, key, words);
  const uint64_t bits = (static_cast<uint64_t>(words[1]) << 32) | words[0];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace faser

#endif  // FASER_PHILOX_H_
