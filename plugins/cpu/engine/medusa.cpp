// Medusa heads: each draft's distribution depends only on the last committed position's hidden row and on its place.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "engine.h"

using faser::Gemm;
using faser::kPanel;
using faser::num_pairs;
using faser::num_panels;
using faser::Team;

namespace {

size_t matrix_words(int num_out, int num_in) {
  return static_cast<size_t>(num_panels(num_out)) * kPanel * static_cast<size_t>(num_pairs(num_in));
}

}  // namespace

// Rows with logits are the first kept ones, in their order. A request's place rises with its steps, pending drafts
// included, so that neighbors mostly share a head.
void faser_engine::plan_medusa(const faser::HeadRows& kept, int num_logit_rows) {
  for (int i = 0; i < kept.count; i++) {
    int32_t& place = places_[kept.entries[i]];
    place = kept.continues ? place + 1 : 0;
  }
  runs_.clear();
  for (int i = 0; i < num_logit_rows; i++) {
    const int head = std::min(places_[kept.entries[i]], medusa_.num_heads);  // num_heads: no head for this place
    if (runs_.empty() || runs_.back().head != head) runs_.push_back({head, i, 0});
    runs_.back().count++;
  }
}

void faser_engine::run_medusa(const Team& team, const faser_batch& batch, const faser::HeadRows& kept,
                              int num_logit_rows, float* logits) {
  const int hidden_size = model_.hidden_size, hidden_panels = num_panels(hidden_size);
  const size_t row_bytes = static_cast<size_t>(hidden_size / 2) * pair_bytes_;
  if (!kept.continues) {
    for (int i = team.begin(kept.count); i < team.end(kept.count); i++)
      gather_features(batch, kept.rows[i], pairs(x_features_, kept.entries[i], hidden_pairs_));
    team.sync();
  }
  const int first = team.begin(num_logit_rows), end = team.end(num_logit_rows);
  for (int i = first; i < end; i++) {
    char* x = pairs(x_hidden_, i, hidden_pairs_);
    std::memcpy(x, pairs(x_features_, kept.entries[i], hidden_pairs_), row_bytes);
    faser::read_pairs(x, hidden_size, pair_bytes_, hidden_ + static_cast<size_t>(i) * hidden_stride_);
  }
  team.sync();
  // Multiplies the rows of each run with its own head's matrix of `matrices`.
  const auto multiply = [&](const uint32_t* matrices, const float* biases, int per_head, int layer, int num_out,
                            float* y, int y_stride) {
    const int panels = num_panels(num_out);
    for (const faser::MedusaRun& run : runs_) {
      if (run.head == medusa_.num_heads) continue;
      const size_t index = static_cast<size_t>(run.head) * per_head + layer;
      const faser::Matrix weights = {matrices + index * matrix_words(num_out, hidden_size), nullptr, 16, 0,
                                     num_pairs(hidden_size)};
      const float* bias = biases != nullptr ? biases + index * hidden_panels * kPanel : nullptr;
      const Gemm gemm = {weights, bias, pairs(x_hidden_, run.first, hidden_pairs_), hidden_pairs_, run.count};
      kernels_.gemm(gemm, team.begin(panels), team.end(panels), y + static_cast<size_t>(run.first) * y_stride,
                    y_stride);
    }
  };
  for (int layer = 0; layer < medusa_.num_layers; layer++) {
    multiply(medusa_.residual, medusa_.residual_bias, medusa_.num_layers, layer, hidden_size, outputs_, hidden_stride_);
    team.sync();
    for (int i = first; i < end; i++) {
      float* hidden = hidden_ + static_cast<size_t>(i) * hidden_stride_;
      const float* added = outputs_ + static_cast<size_t>(i) * hidden_stride_;
      for (int j = 0; j < hidden_size; j++) hidden[j] += added[j] / (1.0f + std::exp(-added[j]));
      kernels_.round_row(hidden, hidden_size, pairs(x_hidden_, i, hidden_pairs_));
    }
    team.sync();
  }
  multiply(model_.lm_head, nullptr, 1, 0, model_.vocab_size, logits, logits_stride());
  for (int i = first; i < end; i++) {
    if (places_[kept.entries[i]] < medusa_.num_heads) continue;
    float* row = logits + static_cast<size_t>(i) * logits_stride();  // -inf ends the request's drafting
    std::fill(row, row + model_.vocab_size, -std::numeric_limits<float>::infinity());
  }
}
