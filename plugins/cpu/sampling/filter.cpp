#include "filter.h"

#include <algorithm>
#include <vector>

namespace faser {
namespace {

// Survivors are mostly within a few nats of the maximum: entries up to the first of these depths that has them all are
// collected and sorted.
constexpr float kDepths[] = {2.0f, 4.0f, 6.0f, 8.0f, 12.0f, 16.0f, 24.0f, kMaxDepth};
constexpr int32_t kMaxSorted = 2048;

// If those are too many to sort, entries are bucketed by depth, 1/64 nat per bucket, the last one for all beyond 32
// nats. Only the bucket with the cut needs sorting.
constexpr int32_t kNumBuckets = 2048;
constexpr float kBucketsPerNat = 64.0f;

struct Scratch {
  std::vector<int32_t> ids;
  int32_t counts[kNumBuckets];
  double masses[kNumBuckets];
};

Scratch& thread_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

// Sorts the first `count` of ids.
void rank(const float* x, int32_t count, std::vector<int32_t>* ids) {
  std::partial_sort(ids->begin(), ids->begin() + count, ids->end(),
                    [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
}

// Returns how many of the ranked ids[0 .. count - 1] raise `reached` to `wanted`; all if they do not suffice.
int32_t num_reaching(const float* weights, const int32_t* ids, int32_t count, double reached, double wanted) {
  for (int32_t i = 0; i < count; ++i) {
    reached += static_cast<double>(weights[ids[i]]);
    if (reached >= wanted) return i + 1;
  }
  return count;
}

double mass_of(const float* weights, const int32_t* ids, int32_t count) {
  double mass = 0.0;
  for (int32_t i = 0; i < count; ++i) mass += static_cast<double>(weights[ids[i]]);
  return mass;
}

// Returns the last survivor, or -1 if too many tokens would have to be sorted.
int32_t cut_by_sorting(const LogitsRow& row, int32_t top_k, float top_p, const float* weights, Scratch* scratch) {
  const double wanted = top_k > 0 ? 0.0 : static_cast<double>(top_p) * row_sum(weights, row.size);
  for (const float depth : kDepths) {
    double mass;
    const int32_t found = count_within(row, depth, weights, &mass);
    if (found > kMaxSorted) return -1;
    const bool enough = top_k > 0 ? found >= top_k : mass > wanted * (1.0 + 1e-12);
    if (!enough && depth < kMaxDepth) continue;
    scratch->ids.resize(static_cast<size_t>(found));
    collect_within(row, depth, scratch->ids.data());
    int32_t kept = top_k > 0 ? std::min(top_k, found) : found;
    rank(row.x, kept, &scratch->ids);
    const int32_t* ids = scratch->ids.data();
    if (top_p < 1.0f) {
      const double target = top_k > 0 ? static_cast<double>(top_p) * mass_of(weights, ids, kept) : wanted;
      kept = num_reaching(weights, ids, kept, 0.0, target);
    }
    return ids[kept - 1];
  }
  return -1;
}

class Buckets {
 public:
  Buckets(const LogitsRow& row, const float* weights, Scratch* scratch) : row_(row), weights_(weights), s_(*scratch) {
    std::fill_n(s_.counts, kNumBuckets, 0);
    std::fill_n(s_.masses, kNumBuckets, 0.0);
    for (int32_t i = 0; i < row.size; ++i) {
      if (!(weights[i] > 0.0f)) continue;
      const int32_t bucket = bucket_of(i);
      ++s_.counts[bucket];
      s_.masses[bucket] += static_cast<double>(weights[i]);
    }
  }

  void keep_top_k(int32_t k) {
    int32_t before = 0;
    for (int32_t bucket = 0; bucket < kNumBuckets; before += s_.counts[bucket++]) {
      if (before + s_.counts[bucket] < k) continue;
      const int32_t kept = k - before;
      collect(bucket, kept);
      last_ = s_.ids[static_cast<size_t>(kept - 1)];
      s_.counts[bucket] = kept;
      s_.masses[bucket] = mass_of(weights_, s_.ids.data(), kept);
      std::fill(s_.counts + bucket + 1, s_.counts + kNumBuckets, 0);
      std::fill(s_.masses + bucket + 1, s_.masses + kNumBuckets, 0.0);
      return;
    }
  }

  void keep_top_p(float top_p) {
    double total = 0.0;
    for (const double mass : s_.masses) total += mass;
    const double wanted = static_cast<double>(top_p) * total;
    double before = 0.0;
    for (int32_t bucket = 0; bucket < kNumBuckets; before += s_.masses[bucket++]) {
      if (s_.counts[bucket] == 0 || before + s_.masses[bucket] < wanted) continue;
      collect(bucket, s_.counts[bucket]);
      const int32_t kept = num_reaching(weights_, s_.ids.data(), s_.counts[bucket], before, wanted);
      last_ = s_.ids[static_cast<size_t>(kept - 1)];
      return;
    }
  }

  int32_t last() const { return last_; }

 private:
  int32_t bucket_of(int32_t i) const {
    const float depth = (row_.x[i] - row_.max) * -row_.inv_temperature;
    return static_cast<int32_t>(std::min(depth * kBucketsPerNat, static_cast<float>(kNumBuckets - 1)));
  }

  void collect(int32_t bucket, int32_t num_ranked) {
    s_.ids.clear();
    for (int32_t i = 0; i < row_.size; ++i) {
      if (weights_[i] > 0.0f && bucket_of(i) == bucket) s_.ids.push_back(i);
    }
    rank(row_.x, num_ranked, &s_.ids);
  }

  const LogitsRow& row_;
  const float* weights_;
  Scratch& s_;
  int32_t last_ = -1;
};

}  // namespace

void filter_top(const LogitsRow& row, int32_t top_k, float top_p, float* weights) {
  Scratch& scratch = thread_scratch();
  int32_t last = cut_by_sorting(row, top_k, top_p, weights, &scratch);
  if (last < 0) {
    Buckets buckets(row, weights, &scratch);
    if (top_k > 0) buckets.keep_top_k(top_k);
    if (top_p < 1.0f) buckets.keep_top_p(top_p);
    last = buckets.last();
  }
  if (last >= 0) zero_behind(row.x, row.size, row.x[last], last, weights);
}

}  // namespace faser
