// Drawing draft tokens.
#include "sample.h"

#include <cstddef>

#include "draw.h"
#include "law.h"
#include "parallel.h"
#include "philox.h"
#include "scratch.h"

namespace faser {

int32_t sample_draft(faser_sampling* s, const float* logits, int32_t vocab_size, int32_t num_known,
                     int32_t max_draft_len) {
  int32_t token = -1;
  if (s->mode == FASER_GREEDY) {
    if (greedy_token(*s, logits, vocab_size, num_known, &token) != FASER_ROW_OK) return -1;
  } else if (s->mode == FASER_SEEDED) {
    float* q = probs_scratch(vocab_size);
    if (next_token_probs(*s, logits, vocab_size, num_known, q) != FASER_ROW_OK) return -1;
    token = race_token(q, vocab_size, s->key, static_cast<uint64_t>(num_known));
  } else {
    float* q = s->draft_probs + static_cast<size_t>(num_known % max_draft_len) * static_cast<size_t>(vocab_size);
    if (next_token_probs(*s, logits, vocab_size, num_known, q) != FASER_ROW_OK) return -1;
    token = draw_token(q, vocab_size, uniform(s->key, s->draft_counter++, kDraftStream));
  }
  s->tokens[num_known] = token;
  return token;
}

}  // namespace faser

int32_t faser_sample_draft(faser_pool* pool, int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                           const float* logits, int32_t logits_stride, int32_t vocab_size, const int32_t* num_known,
                           int32_t max_draft_len, int32_t* out_tokens) {
  if (num_requests < 0 || vocab_size <= 0 || logits_stride < vocab_size || max_draft_len <= 0) {
    return FASER_BAD_ARGUMENT;
  }
  bool all_greedy = true;
  for (int32_t i = 0; i < num_requests; ++i) {
    const faser_sampling& s = sampling[slots[i]];
    if (num_known[i] <= 0 || (s.mode == FASER_SAMPLED && s.draft_probs == nullptr)) return FASER_BAD_ARGUMENT;
    all_greedy &= s.mode == FASER_GREEDY;
  }
  faser::for_each_request(pool, num_requests, num_requests, vocab_size, all_greedy, [&](int i) {
    out_tokens[i] = faser::sample_draft(&sampling[slots[i]], logits + static_cast<size_t>(i) * logits_stride,
                                        vocab_size, num_known[i], max_draft_len);
  });
  return FASER_OK;
}
