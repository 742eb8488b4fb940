// A mixture of experts: each row goes through top_k of them. Rows are gathered by expert, so that an expert's weights
// are read once for all rows of a pass, and each row adds its experts' outputs in their order. So a row's bits do not
// depend on other rows.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "engine.h"
#include "row_kernels.h"

using faser::ExpertGroup;
using faser::Gemm;
using faser::kPanel;
using faser::Matrix;
using faser::num_pairs;
using faser::num_panels;
using faser::round_up;
using faser::Team;

namespace {

constexpr int kChunkPairs = 2048;   // maximum number of pairs in the buffers
constexpr int kItemsPerWorker = 8;  // parts of a product's panels that idle workers take

// Returns matrix `index` of several that follow each other, each with num_out outputs.
Matrix matrix_at(const Matrix& first, int num_out, int index) {
  Matrix found = first;
  const size_t panel = static_cast<size_t>(index) * num_panels(num_out);
  found.words += panel * first.num_pairs * first.bits * (kPanel / 16);
  if (first.scales != nullptr)
    found.scales += panel * (first.group_size > 0 ? 2 * first.num_pairs / first.group_size : 1) * kPanel;
  return found;
}

const float* bias_at(const float* first, int num_out, int index) {
  return first == nullptr ? nullptr : first + static_cast<size_t>(index) * num_panels(num_out) * kPanel;
}

auto gated_product(const faser::Kernels& kernels, const faser_experts& experts) {
  return experts.activation == FASER_CLAMPED ? kernels.gemm_clamped_swiglu : kernels.gemm_swiglu;
}

// Calls body(group, first_panel, last_panel) until idle workers have taken all panels of all groups.
template <typename Body>
void for_panels(const Team& team, faser::Counter& counter, const ExpertGroup* groups, int num_groups, int panels,
                Body&& body) {
  const int64_t total = static_cast<int64_t>(num_groups) * panels;
  const int64_t num_items = std::min<int64_t>(total, kItemsPerWorker * team.size);
  for (int item = counter.next(); item < num_items; item = counter.next()) {
    int64_t at = total * item / num_items;
    const int64_t end = total * (item + 1) / num_items;
    while (at < end) {
      const int first = static_cast<int>(at % panels);
      const int last = static_cast<int>(std::min<int64_t>(panels, first + end - at));
      body(groups[at / panels], first, last);
      at += last - first;
    }
  }
}

}  // namespace

void faser_engine::allocate_experts(size_t num_rows) {
  const auto floats = [&](size_t count) { return reinterpret_cast<float*>(allocate_bytes(count * sizeof(float))); };
  const auto integers = [&](size_t count) {
    return reinterpret_cast<int32_t*>(allocate_bytes(count * sizeof(int32_t)));
  };
  faser::ExpertPairs& p = pairs_;
  const size_t num_all = num_rows * experts_.top_k;
  p.num_pairs = static_cast<int>(std::min<size_t>(num_all, kChunkPairs));
  p.experts = integers(num_all);
  p.places = integers(num_all);
  p.rows = integers(num_all);
  p.weights = floats(num_all);
  p.logits_stride = round_up(experts_.num_experts, kPanel);
  p.logits = floats(num_rows * p.logits_stride);
  p.next.resize(experts_.num_experts);
  p.groups.reserve(experts_.num_experts + num_all / p.num_pairs + 1);
  // A group's rows may begin anywhere among them.
  const size_t num_buffered = round_up(p.num_pairs, faser::kRowAlignment) + size_t{faser::kRowAlignment};
  p.x = allocate_bytes(num_buffered * hidden_pairs_ * pair_bytes_);
  x_mlp_ = allocate_bytes(num_buffered * mlp_pairs_ * pair_bytes_);
  p.outputs = floats(num_buffered * hidden_stride_);
  if (model_.activation_bits == 8)
    p.x_bytes = reinterpret_cast<uint32_t*>(allocate_bytes(num_buffered * bytes_stride_ * sizeof(uint32_t)));
  if (experts_.shared_size == 0) return;
  p.x_shared = allocate_bytes(num_rows * p.shared_pairs * pair_bytes_);
  p.shared_outputs = floats(num_rows * hidden_stride_);
  p.shared_gates = floats(num_rows * kPanel);
}

// Chooses the row's experts, in ascending order, and their weights from its logits.
void faser_engine::choose_experts(int row) {
  const int num_experts = experts_.num_experts, top_k = experts_.top_k;
  float* scores = pairs_.logits + static_cast<size_t>(row) * pairs_.logits_stride;
  int32_t* ids = pairs_.experts + static_cast<size_t>(row) * top_k;
  float* weights = pairs_.weights + static_cast<size_t>(row) * top_k;
  const bool is_softmax = experts_.scoring == FASER_SOFTMAX;
  float max;
  const bool has_max = faser::row_max(scores, num_experts, &max);
  if (has_max && is_softmax) {
    faser::exp_row({scores, num_experts, max, 1.0f}, scores);
    faser::scale_row(static_cast<float>(1.0 / faser::row_sum(scores, num_experts)), num_experts, scores);
  }
  if (has_max) faser::top_ids(scores, num_experts, top_k, ids);
  if (!has_max || ids[top_k - 1] < 0) {  // an input is NaN, so the output is, too
    for (int j = 0; j < top_k; j++) ids[j] = j;
    std::fill(weights, weights + top_k, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  std::sort(ids, ids + top_k);
  for (int j = 0; j < top_k; j++) weights[j] = scores[ids[j]];
  if (!is_softmax) faser::exp_row({weights, top_k, max, 1.0f}, weights);
  if (is_softmax && experts_.norm_topk == 0) return;
  float sum = 0;
  for (int j = 0; j < top_k; j++) sum += weights[j];
  for (int j = 0; j < top_k; j++) weights[j] /= sum;
}

void faser_engine::sort_pairs(int num_rows) {
  faser::ExpertPairs& p = pairs_;
  const int num_all = num_rows * experts_.top_k;
  std::fill(p.next.begin(), p.next.end(), 0);
  for (int i = 0; i < num_all; i++) p.next[p.experts[i]]++;
  p.groups.clear();
  int end = 0;
  for (int expert = 0; expert < experts_.num_experts; expert++) {
    const int count = p.next[expert];
    p.next[expert] = end;
    if (count > 0) p.num_distinct++;
    end += count;
    for (int first = end - count; first < end;) {
      const int last = std::min(end, (first / p.num_pairs + 1) * p.num_pairs);
      p.groups.push_back({expert, first, last - first});
      first = last;
    }
  }
  p.num_layers++;
  for (int i = 0; i < num_all; i++) {
    p.places[i] = p.next[p.experts[i]]++;
    p.rows[p.places[i]] = i / experts_.top_k;
  }
}

void faser_engine::run_experts(const Team& team, int num_rows, int layer) {
  const faser_layer& weights = layers_[layer];
  norm_rows(team, num_rows, nullptr, vectors_[layer].post_norm,
            expert_matrix(weights.gate_up, weights.gate_up_scales, model_.hidden_size));
  const Gemm router = {{weights.router, nullptr, 16, 0, num_pairs(model_.hidden_size)},
                       vectors_[layer].router_bias,
                       x_hidden_,
                       hidden_pairs_,
                       num_rows};
  const int panels = num_panels(experts_.num_experts);
  kernels_.gemm(router, team.begin(panels), team.end(panels), pairs_.logits, pairs_.logits_stride);
  team.sync();
  for (int row = team.begin(num_rows); row < team.end(num_rows); row++) choose_experts(row);
  team.sync();
  if (team.id == 0) sort_pairs(num_rows);
  team.sync();
  const int num_groups = static_cast<int>(pairs_.groups.size());
  for (int first = 0; first < num_groups;) {
    const int chunk = pairs_.groups[first].first / pairs_.num_pairs;
    int end = first;
    while (end < num_groups && pairs_.groups[end].first / pairs_.num_pairs == chunk) end++;
    run_chunk(team, num_rows, layer, pairs_.groups.data() + first, end - first);
    first = end;
  }
  if (experts_.shared_size > 0) run_shared_expert(team, num_rows, layer);
  team.sync();
}

// Adds the outputs of these groups' pairs to the hidden rows.
void faser_engine::run_chunk(const Team& team, int num_rows, int layer, const ExpertGroup* groups, int num_groups) {
  const faser_layer& weights = layers_[layer];
  const Matrix gate_up = expert_matrix(weights.gate_up, weights.gate_up_scales, model_.hidden_size);
  const Matrix down = expert_matrix(weights.down, weights.down_scales, model_.intermediate_size);
  const bool has_bytes = gate_up.input_bits == 8;
  const int first_pair = groups[0].first, end_pair = groups[num_groups - 1].first + groups[num_groups - 1].count;
  const int count = end_pair - first_pair;
  const auto bytes = [&](uint32_t* base, int row) { return base + static_cast<size_t>(row) * bytes_stride_; };
  if (team.id == 0)
    for (faser::Counter& counter : pairs_.counters) counter.reset();
  for (int i = team.begin(count); i < team.end(count); i++) {
    const int row = pairs_.rows[first_pair + i];
    if (has_bytes)
      std::memcpy(bytes(pairs_.x_bytes, i), bytes(x_bytes_, row), sizeof(uint32_t) * bytes_stride_);
    else
      std::memcpy(pairs(pairs_.x, i, hidden_pairs_), pairs(x_hidden_, row, hidden_pairs_), hidden_pairs_ * pair_bytes_);
  }
  team.sync();
  // Returns the product of a group's rows and an expert's matrix. x: of the chunk.
  const auto product_of = [&](const ExpertGroup& group, const Matrix& matrices, const float* biases, int num_out,
                              const char* x, int x_stride) {
    const int row = group.first - first_pair;
    Gemm g = {matrix_at(matrices, num_out, group.expert), bias_at(biases, num_out, group.expert), nullptr, 0,
              group.count};
    g.x = has_bytes ? static_cast<const void*>(bytes(pairs_.x_bytes, row))
                    : x + static_cast<size_t>(row) * x_stride * pair_bytes_;
    g.x_stride = has_bytes ? bytes_stride_ : x_stride;
    return g;
  };
  const int mlp_panels = mlp_size_ / kPanel, hidden_panels = num_panels(model_.hidden_size);
  for_panels(team, pairs_.counters[0], groups, num_groups, mlp_panels, [&](const ExpertGroup& group, int p, int last) {
    const Gemm g = product_of(group, gate_up, weights.gate_up_bias, 2 * mlp_size_, pairs_.x, hidden_pairs_);
    gated_product(kernels_, experts_)(g, p, last, mlp_panels, pairs(x_mlp_, group.first - first_pair, mlp_pairs_),
                                      mlp_pairs_);
  });
  team.sync();
  if (has_bytes) {
    for (int i = team.begin(count); i < team.end(count); i++)
      kernels_.quantize_row(down, pairs(x_mlp_, i, mlp_pairs_), bytes(pairs_.x_bytes, i));
    team.sync();
  }
  for_panels(
      team, pairs_.counters[1], groups, num_groups, hidden_panels, [&](const ExpertGroup& group, int p, int last) {
        const Gemm g = product_of(group, down, weights.down_bias, model_.hidden_size, x_mlp_, mlp_pairs_);
        kernels_.gemm(g, p, last, pairs_.outputs + static_cast<size_t>(group.first - first_pair) * hidden_stride_,
                      hidden_stride_);
      });
  team.sync();
  for (int row = team.begin(num_rows); row < team.end(num_rows); row++) {
    float* hidden = hidden_ + static_cast<size_t>(row) * hidden_stride_;
    for (int j = row * experts_.top_k; j < (row + 1) * experts_.top_k; j++) {
      const int place = pairs_.places[j];
      if (place < first_pair || place >= end_pair) continue;
      const float* output = pairs_.outputs + static_cast<size_t>(place - first_pair) * hidden_stride_;
      const float weight = pairs_.weights[j];
      for (int i = 0; i < hidden_stride_; i++) hidden[i] += weight * output[i];
    }
  }
}

// Adds the output of the expert that all rows go through to the hidden rows, times each row's gate.
void faser_engine::run_shared_expert(const Team& team, int num_rows, int layer) {
  const faser_layer& weights = layers_[layer];
  const Matrix gate_up = layer_matrix(weights.shared_gate_up, weights.shared_gate_up_scales, model_.hidden_size);
  const Matrix down = layer_matrix(weights.shared_down, weights.shared_down_scales, experts_.shared_size);
  const int panels = num_panels(experts_.shared_size), hidden_panels = num_panels(model_.hidden_size);
  const int stride = pairs_.shared_pairs;
  gated_product(kernels_, experts_)(product(gate_up, nullptr, x_hidden_, hidden_pairs_, num_rows), team.begin(panels),
                                    team.end(panels), panels, pairs_.x_shared, stride);
  if (team.id == team.size - 1) {
    const Matrix gate = {weights.shared_gate, nullptr, 16, 0, num_pairs(model_.hidden_size)};
    kernels_.gemm({gate, nullptr, x_hidden_, hidden_pairs_, num_rows}, 0, 1, pairs_.shared_gates, kPanel);
  }
  team.sync();
  quantize_rows(team, num_rows, down, pairs_.x_shared, stride);
  kernels_.gemm(product(down, nullptr, pairs_.x_shared, stride, num_rows), team.begin(hidden_panels),
                team.end(hidden_panels), pairs_.shared_outputs, hidden_stride_);
  team.sync();
  for (int row = team.begin(num_rows); row < team.end(num_rows); row++) {
    const float share = 1.0f / (1.0f + std::exp(-pairs_.shared_gates[static_cast<size_t>(row) * kPanel]));
    float* hidden = hidden_ + static_cast<size_t>(row) * hidden_stride_;
    const float* output = pairs_.shared_outputs + static_cast<size_t>(row) * hidden_stride_;
    for (int i = 0; i < hidden_stride_; i++) hidden[i] += share * output[i];
  }
}
