#include "law.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "row_kernels.h"

namespace faser {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

// Entries are bucketed by how far they lie below the maximum: 1/64 nat per bucket, the last one holds everything below
// exp(-32). Top-k and top-p need an order only within the bucket where they cut.
constexpr int32_t kNumBuckets = 2048;
constexpr float kBucketsPerNat = 64.0f;

// Scratch of the calling thread; grows to the largest vocabulary seen, then stays.
struct Scratch {
  std::vector<float> edited;
  std::vector<int32_t> counts;  // all zero between calls
  std::vector<int32_t> bucket;
  int32_t bucket_counts[kNumBuckets];
  double bucket_masses[kNumBuckets];
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
  return has_penalties(s) || s.num_bias > 0 || s.num_bad_words > 0 || bans_end_ids(s, num_tokens);
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

// Edits up to the bans; returns the row to go on with: logits themselves if nothing changes.
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
  return x;
}

// The edited row and its maximum, or why there is none.
int32_t edited_row(const faser_sampling& s, const float* logits, int32_t vocab_size, int32_t num_tokens,
                   const float** x, float* max) {
  if (!row_max(logits, vocab_size, max)) return FASER_ROW_NAN;
  *x = edit_logits(s, logits, vocab_size, num_tokens);
  if (*x != logits) row_max(*x, vocab_size, max);
  return *max == -kInfinity ? FASER_ROW_EMPTY : FASER_ROW_OK;
}

// Finds the last survivor of top-k, then top-p, in the order (logit descending, id ascending).
class Filter {
 public:
  Filter(const float* x, const float* weights, int32_t n, float max, float inv_temperature)
      : x_(x), weights_(weights), n_(n), max_(max), inv_temperature_(inv_temperature), scratch_(thread_scratch()) {
    std::fill_n(scratch_.bucket_counts, kNumBuckets, 0);
    std::fill_n(scratch_.bucket_masses, kNumBuckets, 0.0);
    for (int32_t i = 0; i < n; ++i) {
      if (!(weights[i] > 0.0f)) continue;
      const int32_t bucket = bucket_of(i);
      ++scratch_.bucket_counts[bucket];
      scratch_.bucket_masses[bucket] += static_cast<double>(weights[i]);
    }
  }

  void keep_top_k(int32_t k) {
    int32_t before = 0;
    for (int32_t bucket = 0; bucket < kNumBuckets; before += scratch_.bucket_counts[bucket++]) {
      if (before + scratch_.bucket_counts[bucket] < k) continue;
      collect_sorted(bucket, k - before);
      cut_at(k - before - 1);
      scratch_.bucket_masses[bucket] = 0.0;
      for (int32_t i = 0; i < k - before; ++i) {
        scratch_.bucket_masses[bucket] += static_cast<double>(weights_[scratch_.bucket[i]]);
      }
      scratch_.bucket_counts[bucket] = k - before;
      std::fill(scratch_.bucket_counts + bucket + 1, scratch_.bucket_counts + kNumBuckets, 0);
      std::fill(scratch_.bucket_masses + bucket + 1, scratch_.bucket_masses + kNumBuckets, 0.0);
      return;
    }
  }

  void keep_top_p(float top_p) {
    double total = 0.0;
    for (const double mass : scratch_.bucket_masses) total += mass;
    const double wanted = static_cast<double>(top_p) * total;
    double before = 0.0;
    for (int32_t bucket = 0; bucket < kNumBuckets; before += scratch_.bucket_masses[bucket++]) {
      if (before + scratch_.bucket_masses[bucket] < wanted || scratch_.bucket_counts[bucket] == 0) continue;
      const int32_t count = scratch_.bucket_counts[bucket];
      collect_sorted(bucket, count);
      double reached = before;
      int32_t last = 0;
      for (; last < count; ++last) {
        reached += static_cast<double>(weights_[scratch_.bucket[last]]);
        if (reached >= wanted) break;
      }
      cut_at(std::min(last, count - 1));
      return;
    }
  }

  // Zeroes the weights of what did not survive.
  void apply(float* weights) const {
    if (cut_id_ >= 0) zero_behind(x_, n_, cut_value_, cut_id_, weights);
  }

 private:
  int32_t bucket_of(int32_t i) const {
    const float below = (x_[i] - max_) * inv_temperature_;
    return static_cast<int32_t>(std::min(below * -kBucketsPerNat, static_cast<float>(kNumBuckets - 1)));
  }

  // The bucket's entries, the first `count` of them in order.
  void collect_sorted(int32_t bucket, int32_t count) {
    std::vector<int32_t>& ids = scratch_.bucket;
    ids.clear();
    for (int32_t i = 0; i < n_; ++i) {
      if (weights_[i] > 0.0f && bucket_of(i) == bucket) ids.push_back(i);
    }
    std::partial_sort(ids.begin(), ids.begin() + count, ids.end(),
                      [x = x_](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
  }

  void cut_at(int32_t rank) {
    cut_id_ = scratch_.bucket[rank];
    cut_value_ = x_[cut_id_];
  }

  const float* x_;
  const float* weights_;
  int32_t n_;
  float max_, inv_temperature_;
  Scratch& scratch_;
  float cut_value_ = 0.0f;
  int32_t cut_id_ = -1;
};

}  // namespace

int32_t greedy_token(const faser_sampling& sampling, const float* logits, int32_t vocab_size, int32_t num_tokens,
                     int32_t* token) {
  const float* x;
  float max;
  const int32_t status = edited_row(sampling, logits, vocab_size, num_tokens, &x, &max);
  if (status == FASER_ROW_OK) *token = first_index_of(x, vocab_size, max);
  return status;
}

int32_t next_token_probs(const faser_sampling& sampling, const float* logits, int32_t vocab_size, int32_t num_tokens,
                         float* probs) {
  const float* x;
  float max;
  const int32_t status = edited_row(sampling, logits, vocab_size, num_tokens, &x, &max);
  if (status != FASER_ROW_OK) return status;
  if (sampling.mode == FASER_GREEDY) {
    std::fill_n(probs, vocab_size, 0.0f);
    probs[first_index_of(x, vocab_size, max)] = 1.0f;
    return FASER_ROW_OK;
  }
  const float inv_temperature = std::min(1.0f / sampling.temperature, kLargest);
  exp_row(x, vocab_size, max, inv_temperature, probs);
  const bool use_top_k = sampling.top_k > 0 && sampling.top_k < vocab_size;
  const bool use_top_p = sampling.top_p < 1.0f;
  if (use_top_k || use_top_p) {
    Filter filter(x, probs, vocab_size, max, inv_temperature);
    if (use_top_k) filter.keep_top_k(sampling.top_k);
    if (use_top_p) filter.keep_top_p(sampling.top_p);
    filter.apply(probs);
  }
  // The largest weight is exactly 1, so min_p itself is the floor.
  if (sampling.min_p > 0.0f) zero_below(vocab_size, sampling.min_p, probs);
  scale_row(static_cast<float>(1.0 / row_sum(probs, vocab_size)), vocab_size, probs);
  return FASER_ROW_OK;
}

}  // namespace faser

int32_t faser_next_token_probs(const faser_sampling* sampling, const float* logits, int32_t vocab_size,
                               int32_t num_tokens, float* probs) {
  return faser::next_token_probs(*sampling, logits, vocab_size, num_tokens, probs);
}
