// Rejection sampling: every row verifies the draft after it, or draws a token if there is none.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "acceptance.h"
#include "draw.h"
#include "faser_cpu.h"
#include "parallel.h"
#include "philox.h"
#include "probs.h"
#include "row_kernels.h"
#include "scratch.h"

namespace faser {
namespace {

struct Verdict {
  int32_t row_status;
  int32_t token;  // the draft if it was accepted, else the recovered or bonus token
};

// The target's own draw decides: a draft is accepted iff it is that draw.
Verdict test_by_own_draw(const faser_sampling& s, const float* logits, int32_t vocab_size, int32_t position) {
  Verdict verdict{FASER_ROW_OK, -1};
  if (s.mode == FASER_GREEDY) {
    verdict.row_status = greedy_token(s, logits, vocab_size, position, &verdict.token);
    return verdict;
  }
  float* p = probs_scratch(vocab_size);
  verdict.row_status = next_token_probs(s, logits, vocab_size, position, p);
  if (verdict.row_status == FASER_ROW_OK) {
    verdict.token = gumbel_max_token(p, vocab_size, s.key, static_cast<uint64_t>(position));
  }
  return verdict;
}

// For a certain draft the target's own draw decides, which is the coupling with a q that has only the draft.
Verdict test_by_draw(const faser_sampling& s, const float* logits, int32_t vocab_size, int32_t position) {
  float* p = probs_scratch(vocab_size);
  const int32_t row_status = next_token_probs(s, logits, vocab_size, position, p);
  if (row_status != FASER_ROW_OK) return {row_status, -1};
  return {FASER_ROW_OK, draw_token(p, vocab_size, uniform(s.key, static_cast<uint64_t>(position), kBonusStream))};
}

// Maximal coupling: a draft drawn from q is accepted with probability min(1, p / q), or a token of norm((p - q)+)
// replaces it.
Verdict test_by_coupling(const faser_sampling& s, const float* logits, int32_t vocab_size, int32_t position,
                         int32_t max_draft_len, bool* accepted) {
  float* p = probs_scratch(vocab_size);
  const int32_t row_status = next_token_probs(s, logits, vocab_size, position, p);
  if (row_status != FASER_ROW_OK) return {row_status, -1};
  const uint64_t index = static_cast<uint64_t>(position);
  const int32_t draft = s.tokens[position];
  const float* q = s.draft_probs + static_cast<size_t>(position % max_draft_len) * static_cast<size_t>(vocab_size);
  const double u = uniform(s.key, index, kTestStream);
  *accepted = u * static_cast<double>(q[draft]) < static_cast<double>(p[draft]);
  if (*accepted) return {FASER_ROW_OK, draft};

  float* residual = residual_scratch(vocab_size);
  residual_row(p, q, vocab_size, residual);
  const double v = uniform(s.key, index, kRecoverStream);
  const int32_t token = draw_token(residual, vocab_size, v);
  // If p and q are equal up to rounding, there is no residual: the draw from p then has the same distribution.
  return {FASER_ROW_OK, token >= 0 ? token : draw_token(p, vocab_size, v)};
}

struct Outcome {
  int32_t num_tokens = 0;
  int32_t num_accepted = 0;
  int32_t outcome = FASER_STILL_PENDING;
  int32_t row_status = FASER_ROW_OK;
};

Outcome accept_request(faser_sampling& s, const float* logits, int32_t logits_stride, int32_t vocab_size,
                       int32_t num_rows, int32_t num_tokens, int32_t num_drafts, int32_t max_draft_len,
                       int32_t* out_tokens) {
  Outcome result;
  // A row's distribution is computed only once the draft before it was accepted.
  for (int32_t row = 0; row < num_rows; ++row) {
    const float* row_logits = logits + static_cast<size_t>(row) * static_cast<size_t>(logits_stride);
    const int32_t position = num_tokens + row;
    const bool has_draft = row < num_drafts;
    bool accepted = false;
    Verdict verdict;
    if (s.mode == FASER_SAMPLED && has_draft && !is_certain(s, position)) {
      verdict = test_by_coupling(s, row_logits, vocab_size, position, max_draft_len, &accepted);
    } else {
      verdict = s.mode == FASER_SAMPLED ? test_by_draw(s, row_logits, vocab_size, position)
                                        : test_by_own_draw(s, row_logits, vocab_size, position);
      accepted = has_draft && verdict.token == s.tokens[position];
    }
    if (verdict.row_status != FASER_ROW_OK) {
      result.outcome = FASER_FAILED;
      result.row_status = verdict.row_status;
      return result;
    }
    out_tokens[result.num_tokens++] = verdict.token;
    if (has_draft) {
      const int32_t source = is_certain(s, position) ? FASER_BY_SUFFIX : FASER_BY_MODEL;
      ++s.num_tested[source];
      s.num_passed[source] += accepted ? 1 : 0;
    }
    if (!accepted) {
      result.outcome = has_draft ? FASER_RECOVERED : FASER_BONUS;
      return result;
    }
    ++result.num_accepted;
  }
  return result;
}

// Checks everything that indexes memory: the slot's own entry, sizes, and the drafts that the rows will look up.
int32_t check_request(const faser_sampling& s, int32_t num_rows, int32_t num_tokens, int32_t num_drafts,
                      int32_t vocab_size, int32_t max_draft_len) {
  if (s.tokens == nullptr || num_rows < 0 || num_tokens <= 0 || num_drafts < 0 || num_drafts > max_draft_len ||
      num_rows > num_drafts + 1) {
    return FASER_BAD_ARGUMENT;
  }
  for (int32_t j = 0; j < std::min(num_rows, num_drafts); ++j) {
    if (s.mode == FASER_SAMPLED && s.draft_probs == nullptr && !is_certain(s, num_tokens + j))
      return FASER_BAD_ARGUMENT;
    const int32_t token = s.tokens[num_tokens + j];
    if (token < 0 || token >= vocab_size) return FASER_BAD_TOKEN;
  }
  return FASER_OK;
}

}  // namespace
}  // namespace faser

int32_t faser_accept(faser_pool* pool, int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                     const float* logits, int32_t logits_stride, int32_t vocab_size, const int32_t* cu_logit_rows,
                     const int32_t* num_tokens, const int32_t* num_drafts, int32_t max_draft_len, int32_t* out_tokens,
                     int32_t* out_num_tokens, int32_t* out_num_accepted, int32_t* out_outcome,
                     int32_t* out_row_status) {
  if (num_requests < 0 || vocab_size <= 0 || logits_stride < vocab_size || max_draft_len < 0) return FASER_BAD_ARGUMENT;
  bool all_greedy = true;
  for (int32_t i = 0; i < num_requests; ++i) {
    const faser_sampling& s = sampling[slots[i]];
    const int32_t status = faser::check_request(s, cu_logit_rows[i + 1] - cu_logit_rows[i], num_tokens[i],
                                                num_drafts[i], vocab_size, max_draft_len);
    if (status != FASER_OK) return status;
    all_greedy &= s.mode == FASER_GREEDY;
  }
  const int32_t num_rows = num_requests > 0 ? cu_logit_rows[num_requests] - cu_logit_rows[0] : 0;
  faser::for_each_request(pool, num_requests, num_rows, vocab_size, all_greedy, [&](int i) {
    const faser::Outcome result = faser::accept_request(
        sampling[slots[i]], logits + static_cast<size_t>(cu_logit_rows[i]) * static_cast<size_t>(logits_stride),
        logits_stride, vocab_size, cu_logit_rows[i + 1] - cu_logit_rows[i], num_tokens[i], num_drafts[i], max_draft_len,
        out_tokens + static_cast<size_t>(i) * static_cast<size_t>(max_draft_len + 1));
    out_num_tokens[i] = result.num_tokens;
    out_num_accepted[i] = result.num_accepted;
    out_outcome[i] = result.outcome;
    out_row_status[i] = result.row_status;
  });
  return FASER_OK;
}
