// The suffix automaton over any text, which grows and starts over, and any prediction of it: all drafts must come from
// one of them.
#include <algorithm>

#include "sampling_request.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  int32_t status;
  faser_suffix* const suffix = faser_suffix_create(1, input.in(2, 60), &status);
  fuzz_expect(suffix != nullptr && status == FASER_OK, "an automaton is made");
  const int num_kinds = input.in(1, 4);
  constexpr int kMax = 400, kMaxDrafts = 8;
  std::vector<int32_t> tokens(kMax + 2 * kMaxDrafts);
  std::vector<int8_t> sources(tokens.size());
  std::vector<float> margins(tokens.size());
  std::vector<int32_t> candidates(tokens.size() * FASER_NUM_CANDIDATES);
  faser_sampling s{};
  s.tokens = tokens.data();
  s.draft_sources = sources.data();
  s.mode = input.in(0, 2);
  s.prompt_len = input.in(1, 20);
  if (input.flag()) s.draft_margins = margins.data();
  if (input.flag()) s.draft_candidates = candidates.data();
  int32_t num_tokens = 0;
  std::vector<int32_t> prediction;
  while (input.size_left() > 0) {
    const int command = input.take<uint8_t>();
    if (command == 255) {
      fuzz_expect(faser_suffix_reset(suffix, 0) == FASER_OK, "a slot begins anew");
      num_tokens = 0;
      prediction.resize(static_cast<size_t>(input.in(0, 12)));
      for (int32_t& token : prediction) token = input.in(0, num_kinds);
      const int32_t size = static_cast<int32_t>(prediction.size());
      const int32_t status = faser_suffix_predict(suffix, 0, prediction.data(), size, input.flag());
      fuzz_expect((status == FASER_OK) == (size > 0), "a prediction has tokens");
    }
    for (int i = command % 32 + 1; i > 0 && num_tokens < kMax; --i) {
      const int token = input.take<uint8_t>();
      tokens[num_tokens++] = token == 255 ? input.take<int32_t>() : token % num_kinds;
    }
    if (num_tokens == 0) continue;
    s.num_tested[FASER_BY_MODEL] += input.in(0, 3);
    s.num_passed[FASER_BY_MODEL] = s.num_tested[FASER_BY_MODEL] / 2;
    const int32_t slot = 0, num_drafts = input.in(0, kMaxDrafts), num_new = input.in(0, kMaxDrafts);
    for (int j = 0; j < num_drafts; ++j) tokens[num_tokens + j] = input.in(0, 5);
    const int32_t num_model = input.in(0, kMaxDrafts);
    int32_t drafted = -1;
    fuzz_expect(
        faser_suffix_draft(suffix, 1, &slot, &s, &num_tokens, &num_drafts, &num_new, &num_model, &drafted) == FASER_OK,
        "drafting runs");
    fuzz_expect(drafted >= 0 && drafted <= num_new, "no more drafts than wanted");
    for (int j = 0; j < drafted; ++j) {
      const size_t place = static_cast<size_t>(num_tokens + num_drafts + j);
      const std::vector<int32_t>& source = sources[place] == FASER_BY_PREDICTION ? prediction : tokens;
      const auto end = sources[place] == FASER_BY_PREDICTION ? source.end() : source.begin() + num_tokens;
      fuzz_expect(std::find(source.begin(), end, tokens[place]) != end, "a draft is of the text, or of the prediction");
    }
  }
  faser_suffix_memory_bytes(suffix);
  faser_suffix_destroy(suffix);
  return 0;
}
