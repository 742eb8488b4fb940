// Finds the verdict of a row of logits with one block; accept_parts.cuh shares most of it.
#ifndef FASER_CUDA_SAMPLING_VERDICT_CUH_
#define FASER_CUDA_SAMPLING_VERDICT_CUH_

#include "ragged.cuh"
#include "sampling/distribution.cuh"
#include "sampling/edit.cuh"

namespace faser {

struct Verdict {
  int32_t status;    // RowStatus
  int32_t token;     // the draft if it was accepted, else the recovered or bonus token
  int32_t accepted;  // 0 or 1
};

// Checks everything that indexes memory: the slot and the counts.
__device__ inline bool is_valid(const Sampling* sampling, int32_t num_slots, int32_t slot, int32_t num_rows,
                                int32_t num_tokens, int32_t num_drafts, int32_t max_draft_len) {
  if (slot < 0 || slot >= num_slots || num_rows < 0 || num_tokens <= 0 || num_tokens > kMaxPositions) return false;
  if (num_drafts < 0 || num_drafts > max_draft_len || num_rows > num_drafts + 1) return false;
  return sampling[slot].tokens != nullptr;
}

// Returns true if the draft was found in the text and not drawn, so that q is 1 at the draft.
__device__ inline bool is_certain(const Sampling& s, int32_t position) {
  return s.draft_sources != nullptr && s.draft_sources[position] != kByModel;
}

// Returns true for an unseeded draft of the draft model, which is tested against the q that it was drawn from.
__device__ inline bool is_coupled(const Sampling& s, int32_t position, bool has_draft) {
  return s.mode == kSampled && has_draft && !is_certain(s, position);
}

// Returns true if `best`, the rank of the row's best entry, decides the verdict, which is then written.
__device__ inline bool judge_best(const Sampling& s, int32_t n, int32_t position, bool has_draft, uint64_t best,
                                  Verdict* verdict) {
  const int32_t draft = has_draft ? s.tokens[position] : -1;
  *verdict = {kRowRefused, -1, 0};
  if (value_of_rank(best) == -INFINITY) {
    verdict->status = kRowEmpty;
    return true;
  }
  if (has_draft && !in_vocabulary(draft, n)) return true;
  if (is_coupled(s, position, has_draft) && s.draft_probs == nullptr) return true;
  if (s.mode != kGreedy) return false;
  const int32_t token = id_of_rank(best);
  *verdict = {kRowOk, token, token == draft};
  return true;
}

__device__ inline const float* draft_probs_of(const Sampling& s, int32_t position, int32_t max_draft_len, int32_t n) {
  return s.draft_probs + static_cast<int64_t>(position % max_draft_len) * n;
}

__device__ inline uint64_t residual_mass(float p, float q) {
  const float difference = add_rn(p, -q);
  return fixed_of(difference > 0.0f ? fminf(difference, 1.0f) : 0.0f, kProbabilityShift);
}

// The verdict for a drawn token, which tests the draft. token: -1 if a filter outside its limits leaves none, and the
// row is refused. draft: -1 for none.
__device__ inline Verdict verdict_of(int32_t token, int32_t draft) {
  return token < 0 ? Verdict{kRowRefused, -1, 0} : Verdict{kRowOk, token, token == draft};
}

template <typename T>
__device__ Verdict judge(const Sampling& s, const Row<T>& row, int32_t position, bool has_draft, int32_t max_draft_len,
                         RowShared* shared) {
  const int32_t n = row.n;
  uint64_t best = 0;
  bool finite = true;
  for_each_entry(row, [&](int32_t id, float value) {
    finite &= is_finite_logit(value);
    best = Max()(best, rank_of(value, id));
  });
  if (__syncthreads_or(!finite)) return {kRowNan, -1, 0};
  best = block_reduce(best, Max());
  Verdict verdict;
  if (judge_best(s, n, position, has_draft, best, &verdict)) return verdict;
  const int32_t draft = has_draft ? s.tokens[position] : -1;
  RowProbs probs;
  probs.max = value_of_rank(best);
  make_probs(s, row, &probs, shared);
  const uint64_t index = static_cast<uint64_t>(position);
  const auto p = [&](int32_t v) { return probs.probability(row[v], v); };
  if (s.mode == kSeeded) return verdict_of(gumbel_max_token<false>(n, s.key, index, p), draft);
  const auto p_mass = [&](int32_t v) { return fixed_of(p(v), kProbabilityShift); };
  if (!is_coupled(s, position, has_draft)) {  // the target's own draw, which also tests a draft that was not drawn
    return verdict_of(draw_index(n, uniform_bits(s.key, index, kBonusStream), p_mass, &shared->draw), draft);
  }
  const float* q = draft_probs_of(s, position, max_draft_len, n);
  const double u = uniform(s.key, index, kTestStream);
  if (u * static_cast<double>(q[draft]) < static_cast<double>(p(draft))) return {kRowOk, draft, 1};

  const uint64_t recover_bits = uniform_bits(s.key, index, kRecoverStream);
  const auto rest_mass = [&](int32_t v) { return residual_mass(p(v), q[v]); };
  int32_t token = draw_index(n, recover_bits, rest_mass, &shared->draw);
  // p and q equal up to rounding leave no residual: the draw from p is then the same distribution.
  if (token < 0) {
    __syncthreads();
    token = draw_index(n, recover_bits, p_mass, &shared->draw);
  }
  return verdict_of(token, -1);
}

// The arguments of accept_rows_* and accept_parts_*.
template <typename T>
struct AcceptRows {
  const Sampling* sampling;
  const int32_t* slots;
  const T* logits;
  const int32_t *cu_logit_rows, *num_tokens, *num_drafts;
  int32_t num_slots, num_requests, num_rows, vocab_size, logits_stride, max_draft_len;
  float* edited_logits;
  int32_t* verdicts;

  // Finds the slot and position of a row, and whether it tests a draft. Returns false if the row belongs to no request;
  // sets slot to -1 if the row must be refused.
  __device__ bool find(int32_t row, int32_t* slot, int32_t* position, bool* has_draft) const {
    const int32_t request = request_of_row(cu_logit_rows, num_requests, row);
    if (row >= num_rows || request < 0) return false;
    const int32_t begin = cu_logit_rows[request];
    if (begin < 0) return false;  // the last launch refuses such a request
    const int32_t frontier = cu_logit_rows[request + 1] - begin, place = row - begin, known = num_tokens[request];
    const int32_t drafts = num_drafts[request];
    *slot = slots[request];
    if (!is_valid(sampling, num_slots, *slot, frontier, known, drafts, max_draft_len)) *slot = -1;
    *position = known + place;
    *has_draft = place < drafts;
    return true;
  }

  __device__ Row<T> entries(int32_t row, bool is_edited) const {
    float* edited = is_edited ? edited_logits + static_cast<int64_t>(row) * vocab_size : nullptr;
    return {logits + static_cast<int64_t>(row) * logits_stride, edited, vocab_size};
  }

  // Writes entries begin .. end of the edited logits if the request edits any. Returns kRowOk, kRowRefused if there is
  // no buffer for them, or kRowNan if the logits there hold a NaN or +inf.
  __device__ RowStatus edit(const Sampling& s, int32_t row, int32_t position, int32_t begin, int32_t end) const {
    if (!has_edits(s, position)) return kRowOk;
    if (edited_logits == nullptr) return kRowRefused;
    float* edited = edited_logits + static_cast<int64_t>(row) * vocab_size;
    const T* original = logits + static_cast<int64_t>(row) * logits_stride;
    return edit_row(s, original, begin, end, vocab_size, position, edited) ? kRowOk : kRowNan;
  }

  // All threads of the block call it, the first one writes.
  __device__ void write(int32_t row, const Verdict& verdict) const {
    if (threadIdx.x != 0) return;
    verdicts[3 * static_cast<int64_t>(row)] = verdict.status;
    verdicts[3 * static_cast<int64_t>(row) + 1] = verdict.token;
    verdicts[3 * static_cast<int64_t>(row) + 2] = verdict.accepted;
  }
};

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_VERDICT_CUH_
