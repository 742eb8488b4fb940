// Drafting and rejection sampling of one request with any parameters and logits, infinities and NaN included: tokens
// are of the vocabulary, probabilities add up to 1.
#include "sampling_request.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  const int vocab_size = input.in(0, 3) == 0 ? input.in(1, 7) : 1 + input.take<uint16_t>() % 3000;
  const int max_draft_len = input.in(1, 4), stride = (vocab_size + 63) / 64 * 64;
  SamplingRequest request(input, vocab_size, max_draft_len);
  faser_sampling& s = request.sampling;
  std::vector<float> logits(static_cast<size_t>(max_draft_len + 1) * stride, 0.0f);
  const float unusual[] = {-std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::infinity(),
                           std::nanf(""),
                           3.4e38f,
                           -3.4e38f,
                           0.0f,
                           -0.0f,
                           1e-40f};
  const float scale = static_cast<float>(input.in(0, 60)) / 8.0f;
  uint32_t noise = input.take<uint32_t>() | 1;
  for (float& logit : logits) {
    noise = noise * 1664525u + 1013904223u;
    logit = scale * static_cast<float>(noise >> 16) / 65536.0f;
  }
  for (int i = input.in(0, 12); i > 0; --i) logits[input.take<uint16_t>() % logits.size()] = unusual[input.in(0, 7)];

  const int num_tokens = input.in(1, SamplingRequest::kMaxTokens - 2 * max_draft_len);
  std::vector<float> probs(vocab_size);
  if (faser_next_token_probs(&s, logits.data(), vocab_size, num_tokens, probs.data()) == FASER_ROW_OK) {
    double sum = 0;
    for (const float p : probs) {
      fuzz_expect(p >= 0.0f && p <= 1.0001f, "a probability is one");
      sum += static_cast<double>(p);
    }
    fuzz_expect(sum > 0.99 && sum < 1.01, "probabilities add up to 1");
  }
  const int32_t slot = 0;
  int32_t num_drafts = 0;
  for (; num_drafts < max_draft_len; ++num_drafts) {
    const int32_t num_known = num_tokens + num_drafts;
    int32_t token = -2;
    fuzz_expect(faser_sample_draft(nullptr, 1, &slot, &s, logits.data() + static_cast<size_t>(num_drafts) * stride,
                                   stride, vocab_size, &num_known, max_draft_len, &token) == FASER_OK,
                "a draft is made or not");
    fuzz_expect(token >= -1 && token < vocab_size, "a draft is of the vocabulary");
    if (token < 0) break;
  }
  const int32_t cu_rows[] = {0, input.in(0, num_drafts + 1)};
  std::vector<int32_t> tokens(max_draft_len + 1);
  int32_t num_new, num_accepted, outcome, row_status;
  const int32_t status =
      faser_accept(nullptr, 1, &slot, &s, logits.data(), stride, vocab_size, cu_rows, &num_tokens, &num_drafts,
                   max_draft_len, tokens.data(), &num_new, &num_accepted, &outcome, &row_status);
  fuzz_expect(status == FASER_OK, "rejection sampling runs");
  fuzz_expect(num_accepted >= 0 && num_accepted <= num_new && num_new <= cu_rows[1], "its counts are possible");
  for (int i = 0; i < num_new; ++i)
    fuzz_expect(tokens[i] >= 0 && tokens[i] < vocab_size, "a token is of the vocabulary");
  return 0;
}
