// Draws one token from a row with one block.
#ifndef FASER_CUDA_SAMPLING_DRAW_CUH_
#define FASER_CUDA_SAMPLING_DRAW_CUH_

#include <cmath>

#include "block.cuh"
#include "sampling/philox.cuh"
#include "sampling/probs.cuh"

namespace faser {

struct DrawShared {
  uint64_t warp_mass[kWarps];
  int32_t token;
};

// The first of the indices begin .. end at which the running sum of mass(begin), ... exceeds `wanted`; -1 if none does.
// All threads must synchronize before `shared` is used again.
template <typename Mass>
__device__ int32_t find_mass(int32_t begin, int32_t end, uint64_t wanted, Mass mass, DrawShared* shared) {
  if (threadIdx.x == 0) shared->token = -1;
  const int32_t piece = ceil_div(end - begin, kThreads);
  const int32_t first = clamp(begin + static_cast<int32_t>(threadIdx.x) * piece, begin, end);
  const int32_t last = clamp(first + piece, first, end);
  uint64_t own = 0;
  for (int32_t i = first; i < last; ++i) own += mass(i);
  uint64_t total;
  uint64_t running = block_exclusive_sum(own, &total);
  if (running <= wanted && wanted < running + own) {
    for (int32_t i = first; i < last; ++i) {
      running += mass(i);
      if (running > wanted) {
        shared->token = i;
        break;
      }
    }
  }
  __syncthreads();
  return shared->token;
}

// The first index at which the running sum of mass(0), mass(1), ... exceeds u times their total; -1 if the total is 0.
// mass: index -> uint64, with a total below 2^64; n at most kMaxPositions. u = uniform_bits * 2^-53. All threads must
// synchronize before `shared` is used again.
template <typename Mass>
__device__ int32_t draw_index(int32_t n, uint64_t uniform_bits, Mass mass, DrawShared* shared) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int32_t part = ceil_div(n, kWarps);
  const int32_t begin = clamp(warp * part, 0, n), end = clamp(begin + part, 0, n);
  uint64_t sum = 0;
  for (int32_t i = begin + lane; i < end; i += kWarpSize) sum += mass(i);
  sum = warp_reduce(sum, Sum());
  if (lane == 0) shared->warp_mass[warp] = sum;
  __syncthreads();
  uint64_t total = 0;
  for (int w = 0; w < kWarps; ++w) total += shared->warp_mass[w];
  if (total == 0) return -1;
  const uint64_t wanted = drawn_mass(uniform_bits, total);
  uint64_t reached = 0;
  int chosen = 0;
  while (chosen < kWarps - 1 && reached + shared->warp_mass[chosen] <= wanted) reached += shared->warp_mass[chosen++];

  const int32_t part_begin = clamp(chosen * part, 0, n);
  return find_mass(part_begin, clamp(part_begin + part, 0, n), wanted - reached, mass, shared);
}

// An upper bound of -log(1 - u) / p for every u whose leading bits are the word, within 1e-5 for small ones.
__host__ __device__ inline float arrival_time_above(uint32_t word, float p) {
#ifdef __CUDA_ARCH__
  const float u = __fmul_rn(__ull2float_ru(static_cast<unsigned long long>(word) + 1), 0x1p-32f);
#else
  const uint64_t next = static_cast<uint64_t>(word) + 1;
  float rounded = static_cast<float>(next);
  if (static_cast<uint64_t>(rounded) < next) rounded = float_of(bits_of(rounded) + 1);
  const float u = rounded * 0x1p-32f;
#endif
  return -log1pf(-u) / p * 1.00001f;
}

// Returns true if -log(1 - u) / p can be at most `bound` for a u whose leading bits are the word; it uses
// -log(1 - u) >= u.
__host__ __device__ inline bool can_win_gumbel_max(uint32_t word, float p, float bound) {
  return static_cast<float>(word >> 8) * 0x1p-24f <= bound * p * 1.00001f;
}

// The first two tokens of a race among those that a thread has seen, by time, then by id.
struct Runners {
  double best = INFINITY, second = INFINITY;
  int32_t best_token = -1, second_token = -1;

  template <bool kLead>
  __device__ void add(double time, int32_t token) {
    if (time < best || (time == best && token < best_token)) {
      second = best;
      second_token = best_token;
      best = time;
      best_token = token;
    } else if (kLead && (time < second || (time == second && token < second_token))) {
      second = time;
      second_token = token;
    }
  }
};

// Returns the winner among the runners of all threads, -1 if there are none. lead and runner_up are as for
// gumbel_max_token().
template <bool kLead>
__device__ int32_t end_race(const Runners& own, double* lead, int32_t* runner_up) {
  uint64_t time_bits;
  memcpy(&time_bits, &own.best, sizeof time_bits);  // times are non-negative, so their bits have the same order
  const uint64_t least = block_reduce(time_bits, Min());
  const bool wins = own.best_token >= 0 && time_bits == least;
  const uint64_t token = block_reduce(wins ? static_cast<uint64_t>(own.best_token) : ~uint64_t{0}, Min());
  if constexpr (kLead) {
    const bool is_winner = wins && token == static_cast<uint64_t>(own.best_token);
    const double best_other = is_winner ? own.second : own.best;
    memcpy(&time_bits, &best_other, sizeof time_bits);
    const uint64_t next = block_reduce(time_bits, Min());
    double winner_time, second_time;
    memcpy(&winner_time, &least, sizeof least);
    memcpy(&second_time, &next, sizeof next);
    *lead = token == ~uint64_t{0} ? 0.0 : log(second_time / winner_time);
    if (runner_up != nullptr) {
      const int32_t follower = is_winner ? own.second_token : own.best_token;
      const bool is_next = follower >= 0 && time_bits == next;
      const uint64_t found = block_reduce(is_next ? static_cast<uint64_t>(follower) : ~uint64_t{0}, Min());
      *runner_up = found == ~uint64_t{0} ? -1 : static_cast<int32_t>(found);
    }
  }
  return token == ~uint64_t{0} ? -1 : static_cast<int32_t>(token);
}

// A draw from p with the Gumbel-max trick, as an exponential race: argmin over p_v > 0 of E_v / p_v, with E_v = -log(1
// - U(key, position, v)); the lowest id wins ties; -1 if no p is positive. p: index -> float. A first pass bounds the
// winner's time E_v / p_v in fp32, so that only the few tokens that can win need a logarithm in fp64.
// lead: with kLead set to log(second smallest time / smallest), infinite if p has one token, 0 if none; the first pass
// then bounds the second smallest time. runner_up: set to the token of that time if not null, -1 if there is none.
template <bool kLead, typename P>
__device__ int32_t gumbel_max_token(int32_t n, uint64_t key, uint64_t position, P p, double* lead = nullptr,
                                    int32_t* runner_up = nullptr) {
  const int32_t num_counters = (n + 63) / 64 * 16;
  float bound = INFINITY, second_bound = INFINITY;
  for (int32_t counter = threadIdx.x; counter < num_counters; counter += kThreads) {
    float probability[4];
    bool any = false;
    for (int word = 0; word < 4; ++word) {
      const int32_t token = gumbel_token_of(counter, word);
      probability[word] = token < n ? p(token) : 0.0f;
      any |= probability[word] > 0.0f;
    }
    if (!any) continue;
    const PhiloxWords words = gumbel_words(key, position, counter);
    for (int word = 0; word < 4; ++word) {
      if (!(probability[word] > 0.0f)) continue;
      const float above = arrival_time_above(words.word[word], probability[word]);
      if constexpr (kLead) second_bound = fminf(second_bound, fmaxf(bound, above));
      bound = fminf(bound, above);
    }
  }
  if constexpr (kLead) {
    // The thread with the least bound leaves it out; if several have it, the bound is looser but valid.
    if (block_reduce(bits_of(bound), Min()) == bits_of(bound)) bound = second_bound;
  }
  bound = float_of(static_cast<uint32_t>(block_reduce(bits_of(bound), Min())));

  Runners own;
  for (int32_t counter = threadIdx.x; counter < num_counters; counter += kThreads) {
    float probability[4];
    bool any = false;
    for (int word = 0; word < 4; ++word) {
      const int32_t token = gumbel_token_of(counter, word);
      probability[word] = token < n ? p(token) : 0.0f;
      any |= probability[word] > 0.0f;
    }
    if (!any) continue;
    const PhiloxWords words = gumbel_words(key, position, counter);
    for (int word = 0; word < 4; ++word) {
      if (!(probability[word] > 0.0f) || !can_win_gumbel_max(words.word[word], probability[word], bound)) continue;
      const int32_t token = gumbel_token_of(counter, word);
      const double u = gumbel_uniform(key, position, token, words.word[word]);
      own.add<kLead>(-log1p(-u) / static_cast<double>(probability[word]), token);
    }
  }
  return end_race<kLead>(own, lead, runner_up);
}

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_DRAW_CUH_
