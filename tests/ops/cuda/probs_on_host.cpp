// The arithmetic of plugins/cuda for single entries, for the tests to compare with numpy.
#include <cstddef>

#include "sampling/draw.cuh"
#include "sampling/philox.cuh"
#include "sampling/probs.cuh"
#include "sampling/race.cuh"
#include "sampling/sampling.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void host_philox(const uint32_t* counter, uint64_t key, uint32_t* out) {
  const faser::PhiloxWords words = faser::philox4x32(counter[0], counter[1], counter[2], counter[3], key);
  for (int i = 0; i < 4; ++i) out[i] = words.word[i];
}
EXPORT double host_uniform(uint64_t key, uint64_t index, int32_t stream) {
  return faser::uniform(key, index, static_cast<faser::RandomStream>(stream));
}
EXPORT void host_gumbel_uniforms(uint64_t key, uint64_t position, int32_t n, double* out, uint32_t* high) {
  for (int32_t counter = 0; counter < (n + 63) / 64 * 16; ++counter) {
    const faser::PhiloxWords words = faser::gumbel_words(key, position, counter);
    for (int word = 0; word < 4; ++word) {
      const int32_t token = faser::gumbel_token_of(counter, word);
      if (token >= n) continue;
      out[token] = faser::gumbel_uniform(key, position, token, words.word[word]);
      high[token] = words.word[word];
    }
  }
}
EXPORT void host_exp(const float* z, int32_t n, float* out) {
  for (int32_t i = 0; i < n; ++i) out[i] = faser::exp_non_positive(z[i]);
}
EXPORT void host_ranks(const float* x, int32_t n, uint64_t* ranks, float* values, int32_t* ids) {
  for (int32_t i = 0; i < n; ++i) {
    ranks[i] = faser::rank_of(x[i], i);
    values[i] = faser::value_of_rank(ranks[i]);
    ids[i] = faser::id_of_rank(ranks[i]);
  }
}
EXPORT uint64_t host_fixed(float x, int32_t shift) { return faser::fixed_of(x, shift); }
EXPORT int32_t host_weight_shift(int32_t n) { return faser::weight_shift(n); }
EXPORT uint64_t host_mass_wanted(float top_p, uint64_t total) { return faser::mass_wanted(top_p, total); }
EXPORT uint64_t host_drawn_mass(uint64_t bits, uint64_t total) { return faser::drawn_mass(bits, total); }
EXPORT float host_arrival_time_above(uint32_t word, float p) { return faser::arrival_time_above(word, p); }
EXPORT int32_t host_can_win_gumbel_max(uint32_t word, float p, float bound) {
  return faser::can_win_gumbel_max(word, p, bound);
}
EXPORT float host_rough_time(uint32_t word, float exponent) { return faser::rough_time(word, exponent); }
EXPORT int32_t host_is_extreme(uint32_t word) { return faser::is_extreme(word); }
EXPORT int32_t host_sampling_size() { return sizeof(faser::Sampling); }
#define OFFSET(field) offsetof(faser::Sampling, field)
EXPORT void host_sampling_offsets(int32_t* out) {
  const size_t offsets[] = {OFFSET(tokens),
                            OFFSET(draft_probs),
                            OFFSET(draft_margins),
                            OFFSET(draft_candidates),
                            OFFSET(draft_sources),
                            OFFSET(end_ids),
                            OFFSET(bias_ids),
                            OFFSET(bias_values),
                            OFFSET(bad_words),
                            OFFSET(cu_bad_words),
                            OFFSET(key),
                            OFFSET(draft_counter),
                            OFFSET(num_tested),
                            OFFSET(num_passed),
                            OFFSET(num_end_ids),
                            OFFSET(num_bias),
                            OFFSET(num_bad_words),
                            OFFSET(prompt_len),
                            OFFSET(min_tokens),
                            OFFSET(mode),
                            OFFSET(top_k),
                            OFFSET(temperature),
                            OFFSET(top_p),
                            OFFSET(min_p),
                            OFFSET(repetition_penalty),
                            OFFSET(presence_penalty),
                            OFFSET(frequency_penalty),
                            OFFSET(num_mask_rows),
                            OFFSET(masks),
                            OFFSET(fill_masks),
                            OFFSET(draft_runners_up)};
  for (size_t i = 0; i < sizeof offsets / sizeof *offsets; ++i) out[i] = static_cast<int32_t>(offsets[i]);
}
