// The layers of an EAGLE-3 head or an MTP module, and the hidden rows that a target keeps for any head.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>

#include "engine.h"

using faser::Gemm;
using faser::kPanel;
using faser::num_pairs;
using faser::num_panels;
using faser::round_up;
using faser::Team;

namespace faser {

void read_pairs(const char* x, int size, size_t pair_bytes, float* values) {
  if (pair_bytes == 2 * sizeof(float)) {
    std::memcpy(values, x, sizeof(float) * static_cast<size_t>(size));
    return;
  }
  for (int i = 0; i < size; i++) {
    uint16_t half;
    std::memcpy(&half, x + sizeof(half) * static_cast<size_t>(i), sizeof(half));
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    std::memcpy(values + i, &bits, sizeof(bits));
  }
}

}  // namespace faser

int32_t faser_engine::attach(faser_engine* target, const int32_t* layers, int num_layers) {
  const bool reads_normed = has_medusa_ || head_.reads_normed != 0;
  if (!is_head() || target == nullptr || target->is_head() || target_ != nullptr || num_layers < 1 ||
      num_layers * target->model_.hidden_size != head_.num_features || target->model_.vocab_size != model_.vocab_size ||
      target->num_blocks_ < num_blocks_ || target->tokens_per_block_ != tokens_per_block_ ||
      (reads_normed && layers[0] != target->model_.num_layers))
    return FASER_BAD_ARGUMENT;
  for (int i = 0; i < num_layers; i++)
    if (layers[i] < (i > 0 ? layers[i - 1] + 1 : 0) || layers[i] > target->model_.num_layers) return FASER_BAD_ARGUMENT;
  target_ = target;
  if (target->captured_ != nullptr) {  // an earlier head has the same target
    const std::vector<int32_t>& kept = target->captured_layers_;
    const bool are_the_same = std::equal(kept.begin(), kept.end(), layers, layers + num_layers);
    if (are_the_same && reads_normed == (target->x_normed_ != nullptr)) return FASER_OK;
    target_ = nullptr;
    return FASER_BAD_ARGUMENT;
  }
  const size_t num_tokens = static_cast<size_t>(target->num_blocks_) * tokens_per_block_;
  if (reads_normed)
    target->x_normed_ =
        target->allocate_bytes(static_cast<size_t>(target->max_num_tokens_) * hidden_pairs_ * pair_bytes_);
  target->captured_ = target->allocate_bytes(num_tokens * (head_.num_features / 2) * pair_bytes_);
  target->captured_layers_.assign(layers, layers + num_layers);
  return FASER_OK;
}

void faser_engine::capture_rows(const Team& team, const faser_batch& batch, int layer) {
  const auto found = std::find(captured_layers_.begin(), captured_layers_.end(), layer);
  if (found == captured_layers_.end()) return;
  const size_t layer_bytes = static_cast<size_t>(model_.hidden_size / 2) * pair_bytes_;
  const size_t place = static_cast<size_t>(found - captured_layers_.begin()) * layer_bytes;
  for (int row = team.begin(batch.num_rows); row < team.end(batch.num_rows); row++) {
    const size_t token = token_index(batch, row_requests_[row], batch.positions[row]);
    const float* hidden = hidden_ + static_cast<size_t>(row) * hidden_stride_;
    char* kept = captured_ + token * layer_bytes * captured_layers_.size() + place;
    if (x_normed_ == nullptr) {
      kernels_.round_row(hidden, model_.hidden_size, kept);
      continue;
    }
    char* x = pairs(x_normed_, row, hidden_pairs_);
    kernels_.norm_row(hidden, final_norm_, model_.hidden_size, hidden_stride_, model_.rms_norm_eps, x);
    std::memcpy(kept, x, layer_bytes);
  }
}

// Copies what the target kept for the position before the row's; zeros if there is none.
void faser_engine::gather_features(const faser_batch& batch, int row, char* x) const {
  const size_t num_bytes = static_cast<size_t>(head_.num_features / 2) * pair_bytes_;
  if (batch.positions[row] == 0)
    std::memset(x, 0, num_bytes);
  else
    std::memcpy(x, target_->captured_ + token_index(batch, row_requests_[row], batch.positions[row] - 1) * num_bytes,
                num_bytes);
}

// Norms a row of features in place, in head_.num_fc_norms parts. values: a buffer of the worker.
void faser_engine::norm_features(float* values, char* x) const {
  const int size = head_.num_features / head_.num_fc_norms;
  const size_t part_bytes = static_cast<size_t>(size / 2) * pair_bytes_;
  char* normed = reinterpret_cast<char*>(values + norm_stride_);
  for (const float* weight : fc_norms_) {
    faser::read_pairs(x, size, pair_bytes_, values);
    std::fill(values + size, values + norm_stride_, 0.0f);
    kernels_.norm_row(values, weight, size, norm_stride_, model_.rms_norm_eps, normed);
    std::memcpy(x, normed, part_bytes);
    x += part_bytes;
  }
}

void faser_engine::run_head_layers(const Team& team, const faser_batch& batch, const faser::HeadRows* kept) {
  const int num_rows = batch.num_rows, hidden_size = model_.hidden_size;
  const bool continues = kept != nullptr && kept->continues;
  const size_t row_bytes = sizeof(float) * static_cast<size_t>(hidden_stride_);
  const int first = team.begin(num_rows), end = team.end(num_rows);
  for (int row = first; row < end; row++) {
    float* hidden = hidden_ + static_cast<size_t>(row) * hidden_stride_;
    kernels_.norm_row(hidden, is_mtp() ? token_norm_ : vectors_[0].input_norm, hidden_size, hidden_stride_,
                      model_.rms_norm_eps, pairs(x_head_, row, 2 * hidden_pairs_));
    char* x = pairs(x_features_, row, feature_pairs_);
    if (continues) {
      std::memcpy(hidden, outputs_ + static_cast<size_t>(kept->entries[row]) * hidden_stride_, row_bytes);
      continue;
    }
    gather_features(batch, row, x);
    if (!fc_norms_.empty()) norm_features(worker_rows_[team.id], x);
    if (is_mtp()) faser::read_pairs(x, hidden_size, pair_bytes_, hidden);
  }
  if (!is_mtp() && !continues) {
    team.sync();
    const int panels = num_panels(hidden_size);
    const faser::Matrix weights = {head_.fc, nullptr, 16, 0, num_pairs(head_.num_features)};
    const Gemm fc = {weights, fc_bias_, x_features_, feature_pairs_, num_rows};
    kernels_.gemm(fc, team.begin(panels), team.end(panels), hidden_, hidden_stride_);
    team.sync();
  }
  for (int row = first; row < end; row++) {
    float* hidden = hidden_ + static_cast<size_t>(row) * hidden_stride_;
    char* x = pairs(x_head_, row, 2 * hidden_pairs_) + static_cast<size_t>(hidden_size / 2) * pair_bytes_;
    if (head_.norm_before_residual) {
      double sum = 0;
      for (int i = 0; i < hidden_size; i++) sum += static_cast<double>(hidden[i]) * static_cast<double>(hidden[i]);
      const float scale = 1.0f / std::sqrt(static_cast<float>(sum / hidden_size) + model_.rms_norm_eps);
      for (int i = 0; i < hidden_size; i++) hidden[i] *= scale * hidden_norm_[i];
      kernels_.round_row(hidden, hidden_size, x);
    } else {
      kernels_.norm_row(hidden, hidden_norm_, hidden_size, hidden_stride_, model_.rms_norm_eps, x);
    }
  }
  team.sync();
  if (is_mtp()) {
    const int panels = num_panels(hidden_size);
    const faser::Matrix weights = {head_.input_proj, nullptr, 16, 0, num_pairs(2 * hidden_size)};
    const Gemm projection = {weights, nullptr, x_head_, 2 * hidden_pairs_, num_rows};
    kernels_.gemm(projection, team.begin(panels), team.end(panels), hidden_, hidden_stride_);
    team.sync();
    run_layer(team, batch, 0);
  } else {
    const int qkv_panels = qkv_stride_ / kPanel;
    const Gemm qkv = {layer_matrix(layers_[0].qkv, layers_[0].qkv_scales, 2 * hidden_size), vectors_[0].qkv_bias,
                      x_head_, 2 * hidden_pairs_, num_rows};
    kernels_.gemm(qkv, team.begin(qkv_panels), team.end(qkv_panels), qkv_, qkv_stride_);
    finish_layer(team, batch, 0);
    for (int layer = 1; layer < model_.num_layers; layer++) run_layer(team, batch, layer);
  }
  if (kept != nullptr) keep_outputs(team, *kept);
}

void faser_engine::keep_outputs(const Team& team, const faser::HeadRows& kept) {
  for (int i = team.begin(kept.count); i < team.end(kept.count); i++) {
    const float* hidden = hidden_ + static_cast<size_t>(kept.rows[i]) * hidden_stride_;
    float* output = outputs_ + static_cast<size_t>(kept.entries[i]) * hidden_stride_;
    if (!is_mtp() && head_.feeds_normed == 0) {
      std::memcpy(output, hidden, sizeof(float) * static_cast<size_t>(hidden_stride_));
      continue;
    }
    char* x = pairs(x_head_, kept.rows[i], 2 * hidden_pairs_);
    kernels_.norm_row(hidden, final_norm_, model_.hidden_size, hidden_stride_, model_.rms_norm_eps, x);
    faser::read_pairs(x, model_.hidden_size, pair_bytes_, output);
  }
}

void faser_engine::spread_logits(const Team& team, int num_logit_rows, float* logits) const {
  const int stride = round_up(num_outputs_, kPanel);
  for (int i = team.begin(num_logit_rows); i < team.end(num_logit_rows); i++) {
    float* row = logits + static_cast<size_t>(i) * logits_stride();
    const float* drafted = output_logits_ + static_cast<size_t>(i) * stride;
    std::fill(row, row + model_.vocab_size, -std::numeric_limits<float>::infinity());
    for (int j = 0; j < num_outputs_; j++) row[output_ids_[j]] = drafted[j];
  }
}

int32_t faser_engine_attach_head(faser_engine* head, faser_engine* target, const int32_t* layers, int32_t num_layers) {
  try {
    return head->attach(target, layers, num_layers);
  } catch (const std::bad_alloc&) {
    return FASER_OUT_OF_MEMORY;
  }
}
