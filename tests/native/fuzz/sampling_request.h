// The sampling parameters of a request from a fuzzer's bytes: what clients may ask for, in memory of just its size.
#ifndef FASER_SAMPLING_REQUEST_H_
#define FASER_SAMPLING_REQUEST_H_

#include <cmath>
#include <limits>
#include <vector>

#include "faser_cpu.h"
#include "input.h"

class SamplingRequest {
 public:
  static constexpr int kMaxTokens = 40;

  SamplingRequest(FuzzInput& input, int vocab_size, int max_draft_len)
      : tokens_(kMaxTokens),
        probs_(static_cast<size_t>(max_draft_len) * vocab_size, 0.0f),
        margins_(kMaxTokens),
        candidates_(kMaxTokens * FASER_NUM_CANDIDATES),
        runners_up_(kMaxTokens),
        sources_(kMaxTokens) {
    const auto token = [&] { return input.in(0, 40) == 40 ? input.take<int32_t>() : input.in(0, 255) % vocab_size; };
    faser_sampling& s = sampling;
    s = {};
    for (int32_t& t : tokens_) t = input.in(0, 255) % vocab_size;
    s.tokens = tokens_.data();
    s.prompt_len = input.in(1, 8);
    s.mode = input.in(0, 2);
    s.key = input.take<uint64_t>();
    s.temperature = s.mode == FASER_GREEDY ? 0.0f : number(input, std::numeric_limits<float>::min(), 3e38f, 1.0f);
    s.top_k = input.flag() ? 0 : input.in(1, 255);
    s.top_p = number(input, std::numeric_limits<float>::min(), 1.0f, 1.0f);
    s.min_p = number(input, 0.0f, 1.0f, 0.0f);
    s.repetition_penalty = number(input, std::numeric_limits<float>::min(), 3e38f, 1.0f);
    s.presence_penalty = number(input, -3e38f, 3e38f, 0.0f);
    s.frequency_penalty = number(input, -3e38f, 3e38f, 0.0f);
    s.min_tokens = input.in(0, 20);
    for (int i = input.in(0, 3); i > 0; --i) end_ids_.push_back(token());
    for (int i = input.in(0, 3); i > 0; --i) {
      bias_ids_.push_back(token());
      bias_.push_back(number(input, -3e38f, 3e38f, 1.0f));
    }
    cu_bad_words_ = {0};
    for (int i = input.in(0, 3); i > 0; --i) {
      for (int j = input.in(0, 4); j > 0; --j) bad_words_.push_back(token());
      cu_bad_words_.push_back(static_cast<int32_t>(bad_words_.size()));
    }
    s.end_ids = end_ids_.data();
    s.num_end_ids = static_cast<int32_t>(end_ids_.size());
    s.bias_ids = bias_ids_.data();
    s.bias_values = bias_.data();
    s.num_bias = static_cast<int32_t>(bias_ids_.size());
    s.bad_words = bad_words_.data();
    s.cu_bad_words = cu_bad_words_.data();
    s.num_bad_words = static_cast<int32_t>(cu_bad_words_.size()) - 1;
    if (input.in(0, 3) == 0) {
      s.num_mask_rows = input.in(1, 4);
      masks_.resize(static_cast<size_t>(s.num_mask_rows) * ((vocab_size + 31) / 32));
      for (uint32_t& word : masks_) word = input.take<uint32_t>();
      s.masks = masks_.data();
    }
    if (s.mode == FASER_SAMPLED) s.draft_probs = probs_.data();
    if (input.flag()) s.draft_margins = margins_.data();
    if (input.flag()) s.draft_candidates = candidates_.data();
    if (input.flag()) s.draft_runners_up = runners_up_.data();
    if (input.flag()) s.draft_sources = sources_.data();
  }
  SamplingRequest(const SamplingRequest&) = delete;
  SamplingRequest& operator=(const SamplingRequest&) = delete;

  faser_sampling sampling;

 private:
  // A number that the checks of requests let through: the usual one, an end, a fraction, or any float between the ends.
  static float number(FuzzInput& input, float least, float most, float usual) {
    switch (input.in(0, 5)) {
      case 0:
        return least;
      case 1:
        return most;
      case 2:
        return std::fmin(most, std::fmax(least, static_cast<float>(input.take<uint8_t>()) / 64.0f));
      case 3: {
        const float any = input.take<float>();
        return any >= least && any <= most ? any : usual;
      }
      default:
        return usual;
    }
  }

  std::vector<int32_t> tokens_;
  std::vector<float> probs_, margins_;
  std::vector<int32_t> candidates_, runners_up_;
  std::vector<int8_t> sources_;
  std::vector<int32_t> end_ids_, bias_ids_, bad_words_, cu_bad_words_;
  std::vector<float> bias_;
  std::vector<uint32_t> masks_;
};

#endif  // FASER_SAMPLING_REQUEST_H_
