#include "probs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "filter.h"
#include "row_kernels.h"

namespace faser {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

// Scratch of the calling thread, which only grows.
struct Scratch {
  std::vector<float> edited;
  std::vector<int32_t> counts;  // all zero between calls
};

Scratch& thread_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

bool has_penalties(const faser_sampling& s) {
  return s.repetition_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f;
}

bool bans_end_ids(const faser_sampling& s, int32_t num_tokens) {
  return s.num_end_ids > 0 && num_tokens - s.prompt_len < s.min_tokens;
}

bool has_edits(const faser_sampling& s, int32_t num_tokens) {
  return has_penalties(s) || s.num_bias > 0 || s.num_bad_words > 0 || bans_end_ids(s, num_tokens) || s.masks != nullptr;
}

bool in_vocabulary(int32_t token, int32_t vocab_size) { return token >= 0 && token < vocab_size; }

// An edit of a finite logit stays finite, so that only bans and the model itself make a token impossible.
float clamp(float before, float after) {
  return before == -kInfinity ? before : std::min(std::max(after, -kLargest), kLargest);
}

void apply_penalties(const faser_sampling& s, int32_t vocab_size, int32_t num_tokens, int32_t* counts, float* x) {
  for (int32_t t = 0; t < num_tokens; ++t) {
    if (in_vocabulary(s.tokens[t], vocab_size)) ++counts[s.tokens[t]];
  }
  for (int32_t t = 0; t < num_tokens; ++t) {
    const int32_t token = s.tokens[t];
    if (!in_vocabulary(token, vocab_size) || counts[token] == 0) continue;
    const float before = x[token];
    float value = before > 0.0f ? before / s.repetition_penalty : before * s.repetition_penalty;
    value = value - s.presence_penalty;
    value = value - s.frequency_penalty * static_cast<float>(counts[token]);
    x[token] = clamp(before, value);
    counts[token] = 0;
  }
}

void ban_bad_words(const faser_sampling& s, int32_t vocab_size, int32_t num_tokens, float* x) {
  for (int32_t w = 0; w < s.num_bad_words; ++w) {
    const int32_t* word = s.bad_words + s.cu_bad_words[w];
    const int32_t prefix_len = s.cu_bad_words[w + 1] - s.cu_bad_words[w] - 1;
    if (prefix_len < 0 || prefix_len > num_tokens) continue;
    const int32_t last = word[prefix_len];
    if (in_vocabulary(last, vocab_size) && std::equal(word, word + prefix_len, s.tokens + num_tokens - prefix_len)) {
      x[last] = -kInfinity;
    }
  }
}

void apply_mask(const uint32_t* mask, int32_t vocab_size, float* x) {
  for (int32_t start = 0; start < vocab_size; start += 32) {
    const uint32_t word = mask[start / 32];
    if (word == ~0u) continue;
    const int32_t size = std::min(32, vocab_size - start);
    for (int32_t i = 0; i < size; ++i) {
      if ((word >> i & 1u) == 0) x[start + i] = -kInfinity;
    }
  }
}

// Applies the edits up to the mask and returns the edited row: logits itself if nothing changes.
const float* edit_logits(const faser_sampling& s, const float* logits, int32_t vocab_size, int32_t num_tokens) {
  if (!has_edits(s, num_tokens)) return logits;
  Scratch& scratch = thread_scratch();
  scratch.edited.assign(logits, logits + vocab_size);
  float* x = scratch.edited.data();
  if (has_penalties(s)) {
    if (scratch.counts.size() < static_cast<size_t>(vocab_size)) scratch.counts.resize(vocab_size);
    apply_penalties(s, vocab_size, num_tokens, scratch.counts.data(), x);
  }
  for (int32_t b = 0; b < s.num_bias; ++b) {
    if (!in_vocabulary(s.bias_ids[b], vocab_size)) continue;
    float& value = x[s.bias_ids[b]];
    value = clamp(value, value + s.bias_values[b]);
  }
  ban_bad_words(s, vocab_size, num_tokens, x);
  if (bans_end_ids(s, num_tokens)) {
    for (int32_t e = 0; e < s.num_end_ids; ++e) {
      if (in_vocabulary(s.end_ids[e], vocab_size)) x[s.end_ids[e]] = -kInfinity;
    }
  }
  if (s.masks != nullptr) {
    const size_t num_words = (static_cast<size_t>(vocab_size) + 31) / 32;
    apply_mask(s.masks + static_cast<size_t>(num_tokens % s.num_mask_rows) * num_words, vocab_size, x);
  }
  return x;
}

}  // namespace

int32_t edited_row(const faser_sampling& s, const float* logits, int32_t vocab_size, int32_t num_tokens,
                   bool wants_second, EditedRow* row) {
  const auto find_max = [&](const float* x) {
    return wants_second ? row_top2(x, vocab_size, &row->max, &row->second) : row_max(x, vocab_size, &row->max);
  };
  if (!find_max(logits)) return FASER_ROW_NAN;
  row->x = edit_logits(s, logits, vocab_size, num_tokens);
  if (row->x != logits && !find_max(row->x)) return FASER_ROW_NAN;
  return row->max == -kInfinity ? FASER_ROW_EMPTY : FASER_ROW_OK;
}

int32_t greedy_token(const faser_sampling& sampling, const float* logits, int32_t vocab_size, int32_t num_tokens,
                     int32_t* token) {
  EditedRow row;
  const int32_t status = edited_row(sampling, logits, vocab_size, num_tokens, false, &row);
  if (status == FASER_ROW_OK) *token = first_index_of(row.x, vocab_size, row.max);
  return status;
}

void probs_of_row(const faser_sampling& sampling, const EditedRow& edited, int32_t vocab_size, float* probs) {
  if (sampling.mode == FASER_GREEDY) {
    std::fill_n(probs, vocab_size, 0.0f);
    probs[first_index_of(edited.x, vocab_size, edited.max)] = 1.0f;
    return;
  }
  const float inv_temperature = std::min(1.0f / sampling.temperature, kLargest);
  const LogitsRow row = {edited.x, vocab_size, edited.max, inv_temperature};
  exp_row(row, probs);
  const int32_t top_k = sampling.top_k < vocab_size ? sampling.top_k : 0;
  if (top_k > 0 || sampling.top_p < 1.0f) {
    filter_top(row, top_k, sampling.top_p, probs);
  }
  // The largest weight is exactly 1, so min_p itself is the floor.
  if (sampling.min_p > 0.0f) zero_below(vocab_size, sampling.min_p, probs);
  scale_row(static_cast<float>(1.0 / row_sum(probs, vocab_size)), vocab_size, probs);
}

int32_t next_token_probs(const faser_sampling& sampling, const float* logits, int32_t vocab_size, int32_t num_tokens,
                         float* probs) {
  EditedRow row;
  const int32_t status = edited_row(sampling, logits, vocab_size, num_tokens, false, &row);
  if (status == FASER_ROW_OK) probs_of_row(sampling, row, vocab_size, probs);
  return status;
}

}  // namespace faser

int32_t faser_next_token_probs(const faser_sampling* sampling, const float* logits, int32_t vocab_size,
                               int32_t num_tokens, float* probs) {
  return faser::next_token_probs(*sampling, logits, vocab_size, num_tokens, probs);
}
