// Early exit: LM head scores of a few candidate tokens from the hidden rows between two segments.
//
// Computed in fp32 with sums in a fixed order: scores are bitwise equal on every instruction set and in any batch.
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "engine.h"
#include "read_output.inl"

// ThreadSanitizer is not initialized yet when the clone is chosen.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#define FASER_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FASER_CLONES
#endif

namespace {

constexpr int kSumLanes = 16;
// With fewer multiply-adds per worker, waking it does not pay off; gathering weights is slow.
constexpr int64_t kMinWorkPerThread = 50'000;

// even, odd [stride / 2]: RMSNorm(h) * weight, split by index parity like the packed weights.
FASER_CLONES
void norm_pairs(const float* h, const float* weight, int size, int stride, float eps, float* even, float* odd) {
  float sums[kSumLanes] = {};
  for (int i = 0; i < stride; i += kSumLanes)
    for (int j = 0; j < kSumLanes; j++) sums[j] += h[i + j] * h[i + j];
  for (int width = kSumLanes / 2; width > 0; width /= 2)
    for (int j = 0; j < width; j++) sums[j] += sums[j + width];
  const float scale = 1.0f / std::sqrt(sums[0] / static_cast<float>(size) + eps);
  for (int i = 0; i < stride / 2; i++) {
    even[i] = h[2 * i] * scale * weight[2 * i];
    odd[i] = h[2 * i + 1] * scale * weight[2 * i + 1];
  }
}

// The row times one column of a packed panel: column [num_pairs] words, FASER_PANEL apart; num_pairs: a multiple of 16.
FASER_CLONES
float dot_column(const uint32_t* column, int num_pairs, const float* even, const float* odd) {
  typedef uint32_t Words __attribute__((vector_size(4 * kSumLanes)));
  typedef float Floats __attribute__((vector_size(4 * kSumLanes)));
  Floats sum = {};
  for (int i = 0; i < num_pairs; i += kSumLanes) {
    const uint32_t* w = column + static_cast<size_t>(i) * FASER_PANEL;
    constexpr int n = FASER_PANEL;
    const Words pairs = {w[0],     w[n],     w[2 * n],  w[3 * n],  w[4 * n],  w[5 * n],  w[6 * n],  w[7 * n],
                         w[8 * n], w[9 * n], w[10 * n], w[11 * n], w[12 * n], w[13 * n], w[14 * n], w[15 * n]};
    Floats a, b;
    std::memcpy(&a, even + i, sizeof a);
    std::memcpy(&b, odd + i, sizeof b);
    sum = sum + (Floats)(pairs << 16) * a + (Floats)(pairs & 0xffff0000u) * b;
  }
  float lanes[kSumLanes];
  std::memcpy(lanes, &sum, sizeof sum);
  for (int width = kSumLanes / 2; width > 0; width /= 2)
    for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
  return lanes[0];
}

// The same for weights [2 * num_pairs] that are floats already.
FASER_CLONES
float dot_floats(const float* weights, int num_pairs, const float* even, const float* odd) {
  float lanes[kSumLanes] = {};
  for (int i = 0; i < num_pairs; i += kSumLanes)
    for (int j = 0; j < kSumLanes; j++)
      lanes[j] = lanes[j] + weights[2 * (i + j)] * even[i + j] + weights[2 * (i + j) + 1] * odd[i + j];
  for (int width = kSumLanes / 2; width > 0; width /= 2)
    for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
  return lanes[0];
}

}  // namespace

int32_t faser_engine::early_exit(const int32_t* rows, int num_rows, const int32_t* candidates, int num_candidates,
                                 float* scores) {
  if (next_layer_ < 0 || num_rows < 0 || num_candidates < 0 || output_ids_ != nullptr) return FASER_BAD_ARGUMENT;
  for (int i = 0; i < num_rows; i++)
    if (rows[i] < 0 || rows[i] >= num_hidden_rows_) return FASER_BAD_ARGUMENT;
  const int64_t num_scores = static_cast<int64_t>(num_rows) * num_candidates;
  for (int64_t i = 0; i < num_scores; i++)
    if (candidates[i] < -1 || candidates[i] >= model_.vocab_size) return FASER_BAD_TOKEN;
  if (num_scores == 0) return FASER_OK;

  const faser::Matrix head = lm_head();
  const int num_pairs = head.num_pairs;
  const size_t panel_words = static_cast<size_t>(num_pairs) * faser::kPanel;
  const int64_t useful = num_scores * model_.hidden_size / kMinWorkPerThread;
  const int limit = pool_->num_threads() < num_rows ? pool_->num_threads() : num_rows;
  const int team_size = useful < 1 ? 1 : useful < limit ? static_cast<int>(useful) : limit;
  faser::TeamChooser& chooser = faser::TeamChooser::of_size(pool_choosers_->exits, faser::log2_of(num_rows));
  const bool use_team = team_size > 1 && (always_team_ || chooser.use_team());
  const auto start = std::chrono::steady_clock::now();
  pool_->run_team(use_team ? team_size : 1, [&](const faser::Team& team) {
    float* even = worker_rows_[team.id];
    float* odd = even + hidden_stride_ / 2;
    float* weights = even + hidden_stride_;
    const auto score = [&](int token) {
      if (head.bits == 16)
        return dot_column(head.words + token / faser::kPanel * panel_words + token % faser::kPanel, num_pairs, even,
                          odd);
      faser::read_output(head, token, model_.hidden_size, weights);
      return dot_floats(weights, num_pairs, even, odd);
    };
    for (int i = team.begin(num_rows); i < team.end(num_rows); i++) {
      norm_pairs(hidden_ + static_cast<size_t>(rows[i]) * hidden_stride_, final_norm_, model_.hidden_size,
                 hidden_stride_, model_.rms_norm_eps, even, odd);
      for (int64_t c = static_cast<int64_t>(i) * num_candidates; c < static_cast<int64_t>(i + 1) * num_candidates;
           c++) {
        const int token = candidates[c];
        scores[c] = token < 0 ? -std::numeric_limits<float>::infinity() : score(token);
      }
    }
  });
  if (team_size > 1) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    chooser.record(use_team, elapsed.count() / static_cast<double>(num_scores));
  }
  return FASER_OK;
}

int32_t faser_engine::hidden_rows(int num_rows, float* hidden) const {
  if (next_layer_ < 0 || num_rows != num_hidden_rows_) return FASER_BAD_ARGUMENT;
  for (int i = 0; i < num_hidden_rows_; i++)
    std::memcpy(hidden + static_cast<size_t>(i) * model_.hidden_size, hidden_ + static_cast<size_t>(i) * hidden_stride_,
                sizeof(float) * model_.hidden_size);
  return FASER_OK;
}

extern "C" {

int32_t faser_engine_early_exit(faser_engine* engine, const int32_t* rows, int32_t num_rows, const int32_t* candidates,
                                int32_t num_candidates, float* scores) {
  return engine->early_exit(rows, num_rows, candidates, num_candidates, scores);
}

int32_t faser_engine_hidden_rows(const faser_engine* engine, int32_t num_rows, float* hidden) {
  return engine->hidden_rows(num_rows, hidden);
}
}
