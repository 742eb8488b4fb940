// Draws a draft token with one block, and writes it with its margin and candidates; draft_parts.cuh shares most of it.
#ifndef FASER_CUDA_SAMPLING_DRAFT_CUH_
#define FASER_CUDA_SAMPLING_DRAFT_CUH_

#include "sampling/distribution.cuh"
#include "sampling/edit.cuh"

namespace faser {

constexpr int kNumCandidates = 8;
constexpr float kLargestMargin = 1e4f;

// The ranks of a thread's best entries, best first, then 0 if there are fewer.
struct Best {
  uint64_t rank[kNumCandidates] = {};

  __device__ void add(uint64_t entry) {
    if (entry <= rank[kNumCandidates - 1]) return;
#pragma unroll
    for (int i = 0; i < kNumCandidates; ++i) {
      const uint64_t held = rank[i];
      rank[i] = entry > held ? entry : held;
      entry = entry > held ? held : entry;
    }
  }

  __device__ void pop() {
#pragma unroll
    for (int i = 1; i < kNumCandidates; ++i) rank[i - 1] = rank[i];
    rank[kNumCandidates - 1] = 0;
  }
};

// Writes the ranks of the best entries of all threads to `ranks`, best first, then 0 if there are fewer.
__device__ inline void block_best(Best best, uint64_t ranks[kNumCandidates]) {
#pragma unroll
  for (int i = 0; i < kNumCandidates; ++i) {
    ranks[i] = block_reduce(best.rank[0], Max());
    if (best.rank[0] == ranks[i]) best.pop();  // ranks are unique, except 0
  }
}

struct Drawn {
  int32_t token;  // -1: the row has no valid distribution
  float margin;
  int32_t runner_up;  // the second in the race of a seeded row, else -1
};

// The lead of the best logit over the second, kLargestMargin if there is no second.
__device__ inline float margin_of(const uint64_t ranks[kNumCandidates]) {
  return ranks[1] == 0 ? kLargestMargin : add_rn(value_of_rank(ranks[0]), -value_of_rank(ranks[1]));
}

// A seeded token, whose margin is its lead in the race.
__device__ inline Drawn seeded_draw(const Sampling& s, int32_t token, double lead, int32_t runner_up) {
  return {token, static_cast<float>(static_cast<double>(s.temperature) * lead), runner_up};
}

__device__ inline Drawn draw_row(const Sampling& s, const Row<float>& row, int32_t position, int32_t step,
                                 float* draft_probs, bool wants_runner_up, uint64_t ranks[kNumCandidates],
                                 RowShared* shared) {
  Best best;
  bool finite = true;
  for_each_entry(row, [&](int32_t id, float value) {
    finite &= is_finite_logit(value);
    best.add(rank_of(value, id));
  });
  if (__syncthreads_or(!finite)) return {-1, 0.0f, -1};
  block_best(best, ranks);
  RowProbs probs;
  probs.max = value_of_rank(ranks[0]);
  if (probs.max == -INFINITY) return {-1, 0.0f, -1};
  const float margin = margin_of(ranks);
  if (s.mode == kGreedy) return {id_of_rank(ranks[0]), margin, -1};
  make_probs(s, row, &probs, shared);
  const auto p = [&](int32_t v) { return probs.probability(row[v], v); };
  if (s.mode == kSeeded) {
    double lead = 0.0;
    int32_t runner_up = -1;
    const int32_t token = gumbel_max_token<true>(row.n, s.key, static_cast<uint64_t>(position), p, &lead,
                                                 wants_runner_up ? &runner_up : nullptr);
    return seeded_draw(s, token, lead, runner_up);
  }
  if (draft_probs == nullptr) return {-1, 0.0f, -1};
  for (int32_t v = threadIdx.x; v < row.n; v += kThreads) draft_probs[v] = p(v);
  const auto mass = [&](int32_t v) { return fixed_of(p(v), kProbabilityShift); };
  const uint64_t counter = s.draft_counter + static_cast<uint64_t>(step);
  return {draw_index(row.n, uniform_bits(s.key, counter, kDraftStream), mass, &shared->draw), margin, -1};
}

// Returns the token that would be drawn without the drawn one: the second in the race if seeded, else the best of the
// others; -1 if there is none.
__device__ inline int32_t runner_up_of(const Sampling& s, const Drawn& drawn, const uint64_t ranks[kNumCandidates]) {
  if (drawn.token < 0) return -1;
  if (s.mode == kSeeded) return drawn.runner_up;
  const uint64_t other = id_of_rank(ranks[0]) == drawn.token ? ranks[1] : ranks[0];
  return other != 0 && value_of_rank(other) > -INFINITY ? id_of_rank(other) : -1;
}

// The arguments of the kernels that draw.
struct SampleRows {
  const Sampling* sampling;
  const float* logits;
  const int32_t *known, *remaining, *slots, *step;
  int32_t num_requests, max_requests, vocab_size, logits_stride, max_draft_len, num_slots;
  float *edited_logits, *draft_probs;
  int32_t* tokens;
  float* margins;
  int32_t *candidates, *runners_up;

  __device__ bool is_step() const { return *step >= 0 && *step < max_draft_len; }

  __device__ bool is_drawing(int32_t request) const {
    const int32_t position = known[request];
    return remaining[request] > 0 && sampling[request].tokens != nullptr && position > 0 && position <= kMaxPositions;
  }

  __device__ Row<float> entries(int32_t request, bool is_edited) const {
    float* edited = is_edited ? edited_logits + static_cast<int64_t>(request) * vocab_size : nullptr;
    return {logits + static_cast<int64_t>(request) * logits_stride, edited, vocab_size};
  }

  // Writes entries begin .. end of the edited logits if the request edits any. Returns false if there is no buffer for
  // them, or if the logits there hold a NaN or +inf.
  __device__ bool edit(int32_t request, int32_t begin, int32_t end) const {
    const Sampling& s = sampling[request];
    const int32_t position = known[request];
    if (!has_edits(s, position)) return true;
    if (edited_logits == nullptr) return false;
    float* edited = edited_logits + static_cast<int64_t>(request) * vocab_size;
    return edit_row(s, entries(request, false).logits, begin, end, vocab_size, position, edited);
  }

  // The row of draft_probs for the distribution of the draw, null if the slot is none of them.
  __device__ float* kept_probs(int32_t request) const {
    const int32_t slot = slots[request];
    if (slot < 0 || slot >= num_slots) return nullptr;
    return draft_probs + (static_cast<int64_t>(slot) * max_draft_len + known[request] % max_draft_len) * vocab_size;
  }

  // All threads of the block call it, the first one writes. ranks: those of the best entries.
  __device__ void write(int32_t request, const Drawn& drawn, const uint64_t ranks[kNumCandidates]) const {
    if (threadIdx.x != 0) return;
    const int64_t at = static_cast<int64_t>(*step) * max_requests + request;
    tokens[at] = drawn.token;
    if (runners_up != nullptr) runners_up[at] = runner_up_of(sampling[request], drawn, ranks);
    margins[at] = drawn.token < 0 ? 0.0f : fminf(drawn.margin, kLargestMargin);
    bool is_missing = true;
#pragma unroll
    for (int i = 0; i < kNumCandidates; ++i) {
      const bool is_possible = drawn.token >= 0 && ranks[i] != 0 && value_of_rank(ranks[i]) > -INFINITY;
      int32_t id = is_possible ? id_of_rank(ranks[i]) : -1;
      is_missing &= id != drawn.token;
      if (i == kNumCandidates - 1 && is_missing) id = drawn.token;
      candidates[at * kNumCandidates + i] = id;
    }
  }
};

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_DRAFT_CUH_
