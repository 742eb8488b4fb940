// Rejection sampling: every live row tests the draft that follows it, or draws where none does.
//
// Two launches. accept_rows_*: one block per row of logits, all at once, since a row's verdict depends only on its own
// distribution, its draft and the noise of its position. accept: one thread per request walks its rows up to the first
// that does not accept, so rows after a rejection are ignored. An unseeded draft of the draft model is coupled with the
// q that it was drawn from; one of the text was not drawn, so the target's own draw tests it.
//
// limits: registers <= 128, spill_bytes <= 0, shared_bytes <= 16384
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

// Whether the draft was not drawn, so that its q is all at it.
__device__ inline bool is_certain(const Sampling& s, int32_t position) {
  return s.draft_sources != nullptr && s.draft_sources[position] != kByModel;
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
  RowProbs probs;
  probs.max = value_of_rank(best);
  if (probs.max == -INFINITY) return {kRowEmpty, -1, 0};

  const int32_t draft = has_draft ? s.tokens[position] : -1;
  if (has_draft && !in_vocabulary(draft, n)) return {kRowRefused, -1, 0};
  const bool is_coupled = s.mode == kSampled && has_draft && !is_certain(s, position);
  if (is_coupled && s.draft_probs == nullptr) return {kRowRefused, -1, 0};
  if (s.mode == kGreedy) {
    const int32_t token = id_of_rank(best);
    return {kRowOk, token, token == draft};
  }
  make_probs(s, row, &probs, shared);
  // A filter beyond its limits leaves no token.
  constexpr Verdict kNothingToDraw = {kRowRefused, -1, 0};
  const uint64_t index = static_cast<uint64_t>(position);
  const auto p = [&](int32_t v) { return probs.probability(row[v], v); };
  if (s.mode == kSeeded) {
    const int32_t token = gumbel_max_token<false>(n, s.key, index, p);
    return token < 0 ? kNothingToDraw : Verdict{kRowOk, token, token == draft};
  }
  const auto p_mass = [&](int32_t v) { return fixed_of(p(v), kProbabilityShift); };
  if (!is_coupled) {  // the target's own draw, which also tests a draft that was not drawn
    const int32_t token = draw_index(n, uniform_bits(s.key, index, kBonusStream), p_mass, &shared->draw);
    return token < 0 ? kNothingToDraw : Verdict{kRowOk, token, token == draft};
  }
  const float* q = s.draft_probs + static_cast<int64_t>(position % max_draft_len) * n;
  const double u = uniform(s.key, index, kTestStream);
  if (u * static_cast<double>(q[draft]) < static_cast<double>(p(draft))) return {kRowOk, draft, 1};

  const uint64_t recover_bits = uniform_bits(s.key, index, kRecoverStream);
  const auto residual_mass = [&](int32_t v) {
    const float difference = add_rn(p(v), -q[v]);
    return fixed_of(difference > 0.0f ? fminf(difference, 1.0f) : 0.0f, kProbabilityShift);
  };
  int32_t token = draw_index(n, recover_bits, residual_mass, &shared->draw);
  // p and q equal up to rounding leave no residual: the draw from p is then the same distribution.
  if (token < 0) {
    __syncthreads();
    token = draw_index(n, recover_bits, p_mass, &shared->draw);
  }
  return token < 0 ? kNothingToDraw : Verdict{kRowOk, token, 0};
}

template <typename T>
__device__ void accept_row(const Sampling* sampling, const int32_t* slots, const T* logits,
                           const int32_t* cu_logit_rows, const int32_t* num_tokens, const int32_t* num_drafts,
                           int32_t num_slots, int32_t num_requests, int32_t num_rows, int32_t vocab_size,
                           int32_t logits_stride, int32_t max_draft_len, float* edited_logits, int32_t* verdicts) {
  __shared__ RowShared shared;
  const int32_t row = blockIdx.x;
  const int32_t request = request_of_row(cu_logit_rows, num_requests, row);
  if (row >= num_rows || request < 0) return;
  const int32_t slot = slots[request];
  const int32_t begin = cu_logit_rows[request];
  if (begin < 0) return;  // the second launch refuses such a request
  const int32_t frontier = cu_logit_rows[request + 1] - begin, place = row - begin;
  Verdict verdict = {kRowRefused, -1, 0};
  if (is_valid(sampling, num_slots, slot, frontier, num_tokens[request], num_drafts[request], max_draft_len)) {
    const Sampling& s = sampling[slot];
    const int32_t position = num_tokens[request] + place;
    const bool has_draft = place < num_drafts[request];
    Row<T> entries = {logits + static_cast<int64_t>(row) * logits_stride, nullptr, vocab_size};
    verdict.status = kRowOk;
    if (has_edits(s, position)) {
      float* edited = edited_logits + static_cast<int64_t>(row) * vocab_size;
      if (edited_logits == nullptr) {
        verdict.status = kRowRefused;
      } else if (!edit_row(s, entries.logits, vocab_size, position, edited)) {
        verdict.status = kRowNan;
      }
      entries.edited = edited;
    }
    if (verdict.status == kRowOk) verdict = judge(s, entries, position, has_draft, max_draft_len, &shared);
  }
  if (threadIdx.x == 0) {
    verdicts[3 * static_cast<int64_t>(row)] = verdict.status;
    verdicts[3 * static_cast<int64_t>(row) + 1] = verdict.token;
    verdicts[3 * static_cast<int64_t>(row) + 2] = verdict.accepted;
  }
}

}  // namespace faser

// sampling: [num_slots] entries of 160 bytes (sampling.cuh). logits: row r begins at r * logits_stride. edited_logits:
// fp32 [num_rows, vocab_size] of scratch, or null where no slot edits its logits. verdicts: int32 [num_rows, 3].
#define FASER_ACCEPT_ROWS(NAME, T)                                                                                     \
  extern "C" __global__ void __launch_bounds__(faser::kThreads, 1) NAME(                                               \
      const faser::Sampling* sampling, const int32_t* slots, const T* logits, const int32_t* cu_logit_rows,            \
      const int32_t* num_tokens, const int32_t* num_drafts, int32_t num_slots, int32_t num_requests, int32_t num_rows, \
      int32_t vocab_size, int32_t logits_stride, int32_t max_draft_len, float* edited_logits, int32_t* verdicts) {     \
    faser::accept_row(sampling, slots, logits, cu_logit_rows, num_tokens, num_drafts, num_slots, num_requests,         \
                      num_rows, vocab_size, logits_stride, max_draft_len, edited_logits, verdicts);                    \
  }
FASER_ACCEPT_ROWS(accept_rows_fp32, float)
FASER_ACCEPT_ROWS(accept_rows_bf16, faser::bf16)
FASER_ACCEPT_ROWS(accept_rows_fp16, faser::fp16)

// token_ids [num_requests, max_draft_len + 1], zero behind the num_committed first; the others [num_requests].
extern "C" __global__ void accept(const faser::Sampling* sampling, const int32_t* slots, const int32_t* cu_logit_rows,
                                  const int32_t* num_tokens, const int32_t* num_drafts, const int32_t* verdicts,
                                  int32_t num_slots, int32_t num_requests, int32_t num_rows, int32_t max_draft_len,
                                  int32_t* token_ids, int32_t* num_committed, int32_t* num_accepted, int32_t* outcome,
                                  int32_t* row_status) {
  const int32_t request = blockIdx.x * blockDim.x + threadIdx.x;
  if (request >= num_requests) return;
  const int32_t begin = cu_logit_rows[request], end = cu_logit_rows[request + 1];
  int32_t* tokens = token_ids + static_cast<int64_t>(request) * (max_draft_len + 1);
  int32_t committed = 0, accepted = 0, how = faser::kStillPending, status = faser::kRowOk;
  if (begin < 0 || end > num_rows ||
      !faser::is_valid(sampling, num_slots, slots[request], end - begin, num_tokens[request], num_drafts[request],
                       max_draft_len)) {
    how = faser::kFailed;
    status = faser::kRowRefused;
  }
  for (int32_t row = begin; how == faser::kStillPending && row < end; ++row) {
    const int32_t* verdict = verdicts + 3 * static_cast<int64_t>(row);
    if (verdict[0] != faser::kRowOk) {
      how = faser::kFailed;
      status = verdict[0];
      break;
    }
    tokens[committed++] = verdict[1];
    if (verdict[2]) {
      ++accepted;
    } else {
      how = row - begin < num_drafts[request] ? faser::kRecovered : faser::kBonus;
    }
  }
  for (int32_t i = committed; i <= max_draft_len; ++i) tokens[i] = 0;
  num_committed[request] = committed;
  num_accepted[request] = accepted;
  outcome[request] = how;
  row_status[request] = status;
}
