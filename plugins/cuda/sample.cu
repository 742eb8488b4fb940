// Draft tokens, in two launches: sample_rows draws one per request and keeps what it was drawn from, by a block per row
// of logits; sample_advance, one block, counts what was drawn and decides who drafts on.
//
// Each entry of a greedy row is read once, of a seeded or unseeded one as in accept.cu. The same arithmetic as the
// native library's, so the same tokens. Speed: not measured.
//
// limits: registers <= 128, spill_bytes <= 0, shared_bytes <= 16384
#include "sampling/distribution.cuh"
#include "sampling/edit.cuh"

namespace faser {

constexpr int kNumCandidates = 8;
constexpr float kLargestMargin = 1e4f;
constexpr int kAdvanceThreads = 256;
constexpr int kNumModes = 3;

// The ranks of one thread's best entries, best first; 0 where there are fewer.
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

// The best entries of all threads' into ranks, best first.
__device__ inline void block_best(Best best, uint64_t ranks[kNumCandidates]) {
#pragma unroll
  for (int i = 0; i < kNumCandidates; ++i) {
    ranks[i] = block_reduce(best.rank[0], Max());
    if (best.rank[0] == ranks[i]) best.pop();  // ranks differ, but for that of nothing
  }
}

struct Drawn {
  int32_t token;  // -1: the row has no valid distribution
  float margin;
  int32_t runner_up;  // in the race of a seeded row
};

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
  const float margin = ranks[1] == 0 ? kLargestMargin : add_rn(probs.max, -value_of_rank(ranks[1]));
  if (s.mode == kGreedy) return {id_of_rank(ranks[0]), margin, -1};
  make_probs(s, row, &probs, shared);
  const auto p = [&](int32_t v) { return probs.probability(row[v], v); };
  if (s.mode == kSeeded) {
    double lead = 0.0;
    int32_t runner_up = -1;
    const int32_t token = gumbel_max_token<true>(row.n, s.key, static_cast<uint64_t>(position), p, &lead,
                                                 wants_runner_up ? &runner_up : nullptr);
    return {token, static_cast<float>(static_cast<double>(s.temperature) * lead), runner_up};
  }
  if (draft_probs == nullptr) return {-1, 0.0f, -1};
  for (int32_t v = threadIdx.x; v < row.n; v += kThreads) draft_probs[v] = p(v);
  const auto mass = [&](int32_t v) { return fixed_of(p(v), kProbabilityShift); };
  const uint64_t counter = s.draft_counter + static_cast<uint64_t>(step);
  return {draw_index(row.n, uniform_bits(s.key, counter, kDraftStream), mass, &shared->draw), margin, -1};
}

// What would have been drawn in place of the token: with a seed the next in its race, else the best of the others.
__device__ inline int32_t runner_up_of(const Sampling& s, const Drawn& drawn, const uint64_t ranks[kNumCandidates]) {
  if (drawn.token < 0) return -1;
  if (s.mode == kSeeded) return drawn.runner_up;
  const uint64_t other = id_of_rank(ranks[0]) == drawn.token ? ranks[1] : ranks[0];
  return other != 0 && value_of_rank(other) > -INFINITY ? id_of_rank(other) : -1;
}

struct AdvanceShared {
  double worths[kAdvanceThreads];
  bool pays;
};

__device__ inline double sigmoid(double z) {
  const double e = exp(z < 0.0 ? z : -z);
  return (z < 0.0 ? e : 1.0) / (1.0 + e);
}

}  // namespace faser

// Of num_requests requests, each with a row of logits and an entry of sampling. known: tokens so far; remaining: tokens
// still wanted, 0 for none; slots: rows of draft_probs [num_slots, max_draft_len, vocab_size]; step: how many draws
// there were before in this call. edited_logits as in accept.cu. tokens, margins [max_draft_len, max_requests] and
// candidates [max_draft_len, max_requests, 8] are written at the step, and so is runners_up [max_draft_len,
// max_requests] unless null.
extern "C" __global__ void __launch_bounds__(faser::kThreads, 1)
    sample_rows(const faser::Sampling* sampling, const float* logits, const int32_t* known, const int32_t* remaining,
                const int32_t* slots, const int32_t* step, int32_t num_requests, int32_t max_requests,
                int32_t vocab_size, int32_t logits_stride, int32_t max_draft_len, int32_t num_slots,
                float* edited_logits, float* draft_probs, int32_t* tokens, float* margins, int32_t* candidates,
                int32_t* runners_up) {
  using namespace faser;
  __shared__ RowShared shared;
  const int32_t request = blockIdx.x, place = *step;
  if (request >= num_requests || place < 0 || place >= max_draft_len) return;
  const Sampling& s = sampling[request];
  const int32_t position = known[request], slot = slots[request];
  uint64_t ranks[kNumCandidates] = {};
  Drawn drawn = {-1, 0.0f, -1};
  if (remaining[request] > 0 && s.tokens != nullptr && position > 0 && position <= kMaxPositions) {
    Row<float> row = {logits + static_cast<int64_t>(request) * logits_stride, nullptr, vocab_size};
    bool is_valid = true;
    if (has_edits(s, position)) {
      float* edited = edited_logits + static_cast<int64_t>(request) * vocab_size;
      is_valid = edited_logits != nullptr && edit_row(s, row.logits, vocab_size, position, edited);
      row.edited = edited;
    }
    float* kept = nullptr;
    if (slot >= 0 && slot < num_slots) {
      kept = draft_probs + (static_cast<int64_t>(slot) * max_draft_len + position % max_draft_len) * vocab_size;
    }
    if (is_valid) drawn = draw_row(s, row, position, place, kept, runners_up != nullptr, ranks, &shared);
  }
  if (threadIdx.x != 0) return;
  const int64_t at = static_cast<int64_t>(place) * max_requests + request;
  tokens[at] = drawn.token;
  if (runners_up != nullptr) runners_up[at] = runner_up_of(s, drawn, ranks);
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

// After sample_rows, by one block. tables: slope, intercept, prior and spread [4, 3 modes, width], row_price [width],
// step_price [max_requests + 1] of core/decision.py DraftStop. newest: the drawn tokens. history: whether a drawn token
// is written behind the known ones of its entry of sampling. known, remaining, pending drafts, survival and step go on;
// num_going: how many requests draft on.
extern "C" __global__ void __launch_bounds__(faser::kAdvanceThreads)
    sample_advance(const faser::Sampling* sampling, const int32_t* tokens, const float* margins, const int32_t* modes,
                   const float* tables, const float* row_price, const float* step_price, int32_t num_requests,
                   int32_t max_requests, int32_t max_draft_len, int32_t width, int32_t history, int32_t* newest,
                   int32_t* known, int32_t* remaining, int32_t* pending, double* survival, int32_t* step,
                   int32_t* num_going) {
  using namespace faser;
  __shared__ AdvanceShared shared;
  const int32_t place = *step;
  if (place < 0 || place >= max_draft_len) {
    if (threadIdx.x == 0) *num_going = 0;  // whatever repeats this while somebody goes on ends
    return;
  }
  double gain = 0.0;
  int32_t count = 0;
  for (int32_t start = 0; start < num_requests; start += kAdvanceThreads) {
    const int32_t request = start + static_cast<int32_t>(threadIdx.x);
    double worth = -1.0;
    if (request < num_requests) {
      const int64_t at = static_cast<int64_t>(place) * max_requests + request;
      const int32_t token = tokens[at];
      const bool is_new = token >= 0 && remaining[request] > 0;
      const int32_t left = is_new ? remaining[request] - 1 : 0;
      newest[request] = is_new ? token : 0;
      if (is_new) {
        const int32_t position = known[request];
        if (history != 0) const_cast<int32_t*>(sampling[request].tokens)[position] = token;
        known[request] = position + 1;
      }
      if (left > 0) {
        const int32_t mode = clamp(modes[request], 0, kNumModes - 1);
        const int32_t drafts = clamp(pending[request], 0, width - 1), next = clamp(drafts + 1, 0, width - 1);
        const double z = static_cast<double>(tables[mode * width + drafts]) * static_cast<double>(margins[at]) +
                         static_cast<double>(tables[(kNumModes + mode) * width + drafts]);
        const double reached = survival[request] * sigmoid(z);
        survival[request] = reached;
        pending[request] = drafts + 1;
        const double prior = static_cast<double>(tables[(2 * kNumModes + mode) * width + next]);
        const double spread = static_cast<double>(tables[(3 * kNumModes + mode) * width + next]);
        const double row = static_cast<double>(row_price[next]);
        const double high = reached * (prior + spread) - row, low = reached * (prior - spread) - row;
        worth = high < 0.0 ? high : 0.5 * (high + fmax(low, 0.0));
      }
      remaining[request] = worth >= 0.0 ? left : 0;
    }
    shared.worths[threadIdx.x] = worth;
    __syncthreads();
    if (threadIdx.x == 0) {  // in the order of the requests, as on the host
      for (int i = 0; i < kAdvanceThreads; ++i) {
        if (shared.worths[i] >= 0.0) {
          gain += shared.worths[i];
          ++count;
        }
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    const bool pays = gain >= static_cast<double>(step_price[count <= max_requests ? count : max_requests]);
    shared.pays = pays;
    *num_going = pays ? count : 0;
    *step = place + 1;
  }
  __syncthreads();
  if (shared.pays) return;
  for (int32_t request = threadIdx.x; request < num_requests; request += kAdvanceThreads) remaining[request] = 0;
}
