// The noise of seeded draws: one uniform number per (key, position, token), computed for many tokens at once.
#ifndef FASER_GUMBEL_MAX_H_
#define FASER_GUMBEL_MAX_H_

#include <cstdint>

namespace faser {

constexpr int32_t kGumbelTokens = 64;

// Computes the high 32 bits of the uniforms of tokens first_token .. first_token + 63 (first_token a multiple of 64).
// Token v takes word (v % 64) / 16 of the counter whose third word is 16 * (v / 64) + v % 16.
void gumbel_words(uint64_t key, uint64_t position, int32_t first_token, uint32_t words[kGumbelTokens]);

// Returns the full uniform of a token, 52 bits in (0, 1), at least word * 2^-32.
double gumbel_uniform(uint64_t key, uint64_t position, int32_t token, uint32_t word);

}  // namespace faser

#endif  // FASER_GUMBEL_MAX_H_
