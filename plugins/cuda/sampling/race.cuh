// A seeded draw by several blocks. Each block estimates the times of its part's tokens and finds the few that can win;
// the last block compares the exact times of those.
#ifndef FASER_CUDA_SAMPLING_RACE_CUH_
#define FASER_CUDA_SAMPLING_RACE_CUH_

#include "sampling/draw.cuh"
#include "sampling/parts.cuh"

namespace faser {

constexpr float kLog2E = 1.44269504f;
constexpr float kMaxInverseTemperature = 1e30f;  // larger ones could overflow in an estimate
constexpr float kRoughness = 1.01f;              // bounds the error in the ratio of two estimates, each within 0.2 %
constexpr double kSureLead = 0x1p-21;            // more than the rounding of two probabilities can change

struct RaceShared {
  uint32_t num_racers;
  int32_t racers[kMaxRacers];
};

// Returns true if the leading bits of u are too few to estimate E = -log(1 - u).
__host__ __device__ inline bool is_extreme(uint32_t word) { return word + 512u < 1024u; }

// An estimate of E * 2^exponent for the E of any u with these leading bits, which must not be extreme; infinite or NaN
// if the weight is 0.
__device__ inline float rough_time(uint32_t word, float exponent) {
  const float u = static_cast<float>(word) * 0x1p-32f + 0x1p-33f;
  const float rest = static_cast<float>(~word) * 0x1p-32f + 0x1p-33f;
  const float e = word < (1u << 25) ? u + 0.5f * u * u : -0.69314718f * log2_approx(rest);
  return e * exp2_approx(exponent);
}

// Removes from a race the tokens that the filters drop.
__device__ inline void drop(const RowProbs& probs, PartEntries* entries) {
#pragma unroll
  for (int i = 0; i < kThreadEntries; ++i) {
    if (!(probs.kept_weight(entries->value[i], entries->id(i)) > 0.0f)) entries->value[i] = -INFINITY;
  }
}

// Writes the racers of a part to its record: the tokens that can be first (kLead: or second) in the part, at times
// E exp((top - value) * inv_temperature). If they are more than kMaxRacers, only their number is of use. n: entries of
// the row. top: at least the part's largest value. entries: overwritten with times.
template <bool kLead>
__device__ void find_racers(PartEntries& entries, int32_t n, float top, float inv_temperature, uint64_t key,
                            uint64_t position, PartRecord* record, RaceShared* shared) {
  if (threadIdx.x == 0) shared->num_racers = 0;
  __syncthreads();
  if (!(inv_temperature < kMaxInverseTemperature)) {  // no estimates
    if (threadIdx.x == 0) record->num_racers = kMaxRacers + 1;
    return;
  }
  const auto add = [&](int32_t token) {
    const uint32_t place = atomicAdd(&shared->num_racers, 1u);
    if (place < kMaxRacers) shared->racers[place] = token;
  };
  const float per_logit = inv_temperature * kLog2E;
  float first = INFINITY, second = INFINITY;
  bool any_extreme = false;
#pragma unroll
  for (int i = 0; i < kThreadEntries; i += 4) {
    const PhiloxWords words = gumbel_words(key, position, entries.counter(i));
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      float time = rough_time(words.word[word], (top - entries.value[i + word]) * per_logit);
      if (is_extreme(words.word[word])) {
        any_extreme = true;
        time = INFINITY;
      }
      entries.value[i + word] = time;
      if (kLead) second = fminf(second, fmaxf(first, time));
      first = fminf(first, time);
    }
  }
  if (any_extreme) {  // about one thread in 250,000
#pragma unroll 1
    for (int i = 0; i < kThreadEntries; i += 4) {
      const PhiloxWords words = gumbel_words(key, position, entries.counter(i));
      for (int word = 0; word < 4; ++word) {
        const int32_t token = entries.id(i) + word * 16;
        if (is_extreme(words.word[word]) && token < n) add(token);
      }
    }
  }
  float own = first;
  if constexpr (kLead) {
    // The thread with the least time leaves it out; if several have it, the bound is looser but valid.
    if (-block_max(-first) == first) own = second;
  }
  const float bound = fminf(-block_max(-own) * kRoughness, kLargest);
  if (first <= bound) {
#pragma unroll
    for (int i = 0; i < kThreadEntries; ++i) {
      if (entries.value[i] <= bound) add(entries.id(i));
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const uint32_t num_racers = shared->num_racers;
  record->num_racers = num_racers;
  for (uint32_t i = 0; i < num_racers && i < kMaxRacers; ++i) record->racers[i] = shared->racers[i];
}

// Returns the token with the least exact time E / p among the racers of all parts, or among all n tokens if a part has
// more racers than it keeps; -1 if there is none. p: token -> float. lead and runner_up are as for gumbel_max_token(),
// but only racers are seen: a lead over another token is far above kSureLead, and may be reported too large.
template <typename P>
__device__ int32_t compare_racers(const PartRecord* parts, int32_t num_parts, int32_t n, uint64_t key,
                                  uint64_t position, P p, double* lead, int32_t* runner_up) {
  bool are_many = false;
  for (int32_t i = threadIdx.x; i < num_parts; i += kThreads) are_many |= parts[i].num_racers > kMaxRacers;
  are_many = __syncthreads_or(are_many);
  const int32_t num_tokens = are_many ? n : num_parts * kMaxRacers;
  Runners own;
  for (int32_t i = threadIdx.x; i < num_tokens; i += kThreads) {
    int32_t token = i;
    if (!are_many) {
      const PartRecord& part = parts[i / kMaxRacers];
      if (i % kMaxRacers >= part.num_racers) continue;
      token = part.racers[i % kMaxRacers];
    }
    const float probability = p(token);
    if (!(probability > 0.0f)) continue;
    const PhiloxWords words = gumbel_words(key, position, token / 64 * 16 + token % 16);
    const int32_t which = token % 64 / 16;
    const uint32_t low = which == 0 ? words.word[0] : words.word[1], high = which == 2 ? words.word[2] : words.word[3];
    const double u = gumbel_uniform(key, position, token, which < 2 ? low : high);
    own.add<true>(-log1p(-u) / static_cast<double>(probability), token);
  }
  return end_race<true>(own, lead, runner_up);
}

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_RACE_CUH_
