// One forward pass: one fork, barriers between the phases of each layer, one join.
#include <algorithm>
#include <cmath>

#include "engine.h"

using faser::Gemm;
using faser::kPanel;
using faser::round_up;
using faser::Team;

using faser::num_panels;

int32_t faser_engine::check(const faser_batch& batch, int first_layer, int last_layer, const int32_t* logit_rows,
                            int num_logit_rows) const {
  const bool continues = first_layer > 0;
  if (first_layer < 0 || first_layer >= last_layer || last_layer > model_.num_layers || batch.num_requests < 0 ||
      batch.num_requests > max_num_requests_ || batch.num_rows < 0 || batch.num_rows > max_num_tokens_ ||
      num_logit_rows < 0 || num_logit_rows > batch.num_rows)
    return FASER_BAD_ARGUMENT;
  if (continues && (first_layer != next_layer_ || batch.num_rows != num_hidden_rows_)) return FASER_BAD_ARGUMENT;
  if (batch.cu_rows[0] != 0 || batch.cu_rows[batch.num_requests] != batch.num_rows) return FASER_BAD_ARGUMENT;
  for (int i = 0; i < num_logit_rows; i++)
    if (logit_rows[i] < (i > 0 ? logit_rows[i - 1] + 1 : 0) || logit_rows[i] >= batch.num_rows)
      return FASER_BAD_ARGUMENT;

  for (int i = 0; i < batch.num_requests; i++) {
    const int first = batch.cu_rows[i], end = batch.cu_rows[i + 1];
    if (first > end || end > batch.num_rows || batch.slots[i] < 0 || batch.slots[i] >= max_num_requests_)
      return FASER_BAD_ARGUMENT;
    if (first == end) continue;
    const int position = batch.positions[first];
    if (position < 0 || position > model_.max_seq_len - (end - first)) return FASER_BAD_POSITION;
    for (int row = first; row < end; row++) {
      if (batch.token_ids[row] < 0 || batch.token_ids[row] >= model_.vocab_size) return FASER_BAD_TOKEN;
      if (batch.positions[row] != position + row - first) return FASER_BAD_POSITION;
    }
    const int num_blocks = batch.positions[end - 1] / tokens_per_block_ + 1;
    if (num_blocks > batch.max_blocks_per_seq) return FASER_BAD_POSITION;
    const int32_t* blocks = batch.block_table + static_cast<size_t>(batch.slots[i]) * batch.max_blocks_per_seq;
    const int first_block = widest_window_ > 0 ? std::max(0, position - widest_window_ + 1) / tokens_per_block_ : 0;
    for (int b = first_block; b < num_blocks; b++)
      if (blocks[b] < 0 || blocks[b] >= num_blocks_) return FASER_BAD_BLOCK;
  }
  if (batch.num_branches < 0 || batch.num_branches > batch.num_requests) return FASER_BAD_ARGUMENT;
  const int num_parents = batch.num_requests - batch.num_branches;
  for (int k = 0; k < batch.num_branches; k++) {
    const int request = num_parents + k;
    if (batch.branch_parents[k] < 0 || batch.branch_parents[k] >= num_parents ||
        batch.cu_rows[request + 1] != batch.cu_rows[request] + 1)
      return FASER_BAD_ARGUMENT;
  }
  return FASER_OK;
}

void faser_engine::plan_tiles(const faser_batch& batch) {
  const int group = heads_.num_heads / heads_.num_kv_heads;
  tiles_.clear();
  for (int i = 0; i < batch.num_requests; i++) {
    const int first = batch.cu_rows[i], end = batch.cu_rows[i + 1];
    std::fill(row_requests_ + first, row_requests_ + end, i);
    const int num_queries = (end - first) * group;
    const int num_tiles = (num_queries + kernels_.tile_size - 1) / kernels_.tile_size;
    for (int kv_head = 0; kv_head < heads_.num_kv_heads; kv_head++) {
      for (int tile = 0, query = 0; tile < num_tiles; tile++) {
        const int count = (num_queries - query + num_tiles - tile - 1) / (num_tiles - tile);
        tiles_.push_back({i, kv_head, query, count});
        query += count;
      }
    }
  }
}

void faser_engine::plan_branches(const faser_batch& batch) {
  branch_rows_.clear();
  const int num_parents = batch.num_requests - batch.num_branches;
  for (int k = 0; k < batch.num_branches; k++) {
    const int parent = batch.branch_parents[k];
    const int position = batch.positions[batch.cu_rows[num_parents + k]];
    const int place = position / tokens_per_block_;
    const int block =
        batch.block_table[static_cast<size_t>(batch.slots[num_parents + k]) * batch.max_blocks_per_seq + place];
    for (int row = batch.cu_rows[parent]; row < batch.cu_rows[parent + 1] && batch.positions[row] < position; row++)
      if (batch.positions[row] / tokens_per_block_ == place)
        branch_rows_.push_back({row, block, batch.positions[row] % tokens_per_block_});
  }
  std::sort(branch_rows_.begin(), branch_rows_.end(),
            [](const faser::BranchRow& a, const faser::BranchRow& b) { return a.row < b.row; });
}

// Approximate number of multiply-adds. The first row counts more, because it loads the weights.
int64_t faser_engine::work_of(int num_rows, int num_layers, int num_logit_rows) const {
  const int64_t hidden = model_.hidden_size;
  const int64_t attention = hidden * (2 * heads_.num_heads + 2 * heads_.num_kv_heads) * heads_.head_dim;
  const int64_t mlp = 3 * hidden * model_.intermediate_size;
  if (has_medusa_) return (num_logit_rows + 3) * hidden * (medusa_.num_layers * hidden + model_.vocab_size);
  const int64_t head = num_logit_rows > 0 ? (num_logit_rows + 3) * hidden * num_outputs_ : 0;
  if (experts_.num_experts == 0) return (num_rows + 3) * (attention + mlp) * num_layers + head;
  const int64_t num_pairs = static_cast<int64_t>(num_rows) * experts_.top_k;
  const int64_t num_loaded = std::min<int64_t>(num_pairs, experts_.num_experts);
  const int64_t dense = attention + hidden * (experts_.num_experts + 3 * experts_.shared_size);
  return ((num_rows + 3) * dense + (num_pairs + 3 * num_loaded) * mlp) * num_layers + head;
}

void faser_engine::begin_rows(const Team& team, const faser_batch& batch, bool embed) {
  const int half = heads_.head_dim / 2;
  const float scale = model_.rope_attention_factor;
  for (int row = team.begin(batch.num_rows); row < team.end(batch.num_rows); row++) {
    const float position = static_cast<float>(batch.positions[row]);
    float* cos = cos_ + static_cast<size_t>(row) * half;
    float* sin = sin_ + static_cast<size_t>(row) * half;
    for (int i = 0; i < half; i++) {
      const float angle = position * model_.rope_inv_freq[i];
      cos[i] = std::cos(angle) * scale;
      sin[i] = std::sin(angle) * scale;
    }
    if (!embed) continue;
    const int token = batch.token_ids[row];
    float* hidden = hidden_ + static_cast<size_t>(row) * hidden_stride_;
    if (model_.embedding != nullptr) {
      kernels_.embed_row(model_.embedding + static_cast<size_t>(token) * model_.hidden_size, model_.hidden_size, hidden,
                         hidden_stride_);
    } else {
      kernels_.embed_output(lm_head(), token, model_.hidden_size, hidden, hidden_stride_);
    }
  }
}

void faser_engine::norm_rows(const Team& team, int num_rows, const int32_t* rows, const float* weight,
                             const faser::Matrix& next) {
  for (int i = team.begin(num_rows); i < team.end(num_rows); i++) {
    const float* hidden = hidden_ + static_cast<size_t>(rows != nullptr ? rows[i] : i) * hidden_stride_;
    kernels_.norm_row(hidden, weight, model_.hidden_size, hidden_stride_, model_.rms_norm_eps,
                      pairs(x_hidden_, i, hidden_pairs_));
  }
  if (next.input_bits == 8)
    quantize_rows(team, num_rows, next, x_hidden_, hidden_pairs_);
  else
    team.sync();
}

// Each worker handles the rows that it would norm.
void faser_engine::quantize_rows(const Team& team, int num_rows, const faser::Matrix& next, const char* x,
                                 int x_stride) {
  if (next.input_bits != 8) return;
  for (int i = team.begin(num_rows); i < team.end(num_rows); i++)
    kernels_.quantize_row(next, x + static_cast<size_t>(i) * x_stride * pair_bytes_,
                          x_bytes_ + static_cast<size_t>(i) * bytes_stride_);
  team.sync();
}

Gemm faser_engine::product(const faser::Matrix& weights, const float* bias, const char* x, int x_stride,
                           int num_rows) const {
  if (weights.input_bits == 8) return {weights, bias, x_bytes_, bytes_stride_, num_rows};
  return {weights, bias, x, x_stride, num_rows};
}

void faser_engine::attend(const Team& team, const faser_batch& batch, int layer) {
  const faser::KvLayer kv = kv_layer(layer);
  const int group = heads_.num_heads / heads_.num_kv_heads;
  const int num_tiles = static_cast<int>(tiles_.size());
  faser::Counter& counter = tile_counters_[layer % 2];
  for (int t = counter.next(); t < num_tiles; t = counter.next()) {
    const faser::TileRange& range = tiles_[t];
    faser::AttentionTile tile;
    tile.blocks = batch.block_table + static_cast<size_t>(batch.slots[range.request]) * batch.max_blocks_per_seq;
    tile.kv_head = range.kv_head;
    tile.num_queries = range.num_queries;
    const float* sinks = layers_[layer].sinks;
    tile.has_sinks = sinks != nullptr;
    for (int j = 0; j < range.num_queries; j++) {
      const int query = range.first_query + j;
      const int row = batch.cu_rows[range.request] + query / group;
      const int head = range.kv_head * group + query % group;
      tile.queries[j] = pairs(queries_, row, query_pairs_) + head * (heads_.padded_dim / 2) * pair_bytes_;
      if (tile.has_sinks) tile.sinks[j] = sinks[head];
      tile.outputs[j] = pairs(x_attention_, row, attention_pairs_) + head * (heads_.head_dim / 2) * pair_bytes_;
      tile.end[j] = batch.positions[row] + 1;
      const int window = windows_[layer];
      tile.begin[j] = window > 0 ? std::max(0, tile.end[j] - window) : 0;
      if (is_block() && !causal_[layer]) tile.end[j] = batch.positions[batch.cu_rows[range.request + 1] - 1] + 1;
      if (has_head_ && tile.end[j] > 1) tile.begin[j] = std::max(tile.begin[j], 1);  // position 0 has no features
    }
    kernels_.verify_attention(heads_, kv, tile, scratch_[team.id]);
  }
}

void faser_engine::run_layer(const Team& team, const faser_batch& batch, int layer) {
  const faser_layer& weights = layers_[layer];
  const faser::LayerVectors& vectors = vectors_[layer];
  const int num_rows = batch.num_rows;

  const faser::Matrix qkv_weights = layer_matrix(weights.qkv, weights.qkv_scales, model_.hidden_size);
  norm_rows(team, num_rows, nullptr, vectors.input_norm, qkv_weights);
  const int qkv_panels = qkv_stride_ / kPanel;
  const Gemm qkv = product(qkv_weights, vectors.qkv_bias, x_hidden_, hidden_pairs_, num_rows);
  kernels_.gemm(qkv, team.begin(qkv_panels), team.end(qkv_panels), qkv_, qkv_stride_);
  finish_layer(team, batch, layer);
}

void faser_engine::append_rows(const Team& team, const faser_batch& batch, int layer) {
  const faser::KvLayer kv = kv_layer(layer);
  const int half = heads_.head_dim / 2;
  const auto append = [&](int row, int block, int offset) {
    kernels_.append_kv(heads_, qkv_ + static_cast<size_t>(row) * qkv_stride_, vectors_[layer].q_norm,
                       vectors_[layer].k_norm, cos_ + static_cast<size_t>(row) * half,
                       sin_ + static_cast<size_t>(row) * half, pairs(queries_, row, query_pairs_), kv, block, offset);
  };
  const int first_row = team.begin(batch.num_rows), end_row = team.end(batch.num_rows);
  auto branch = std::lower_bound(branch_rows_.begin(), branch_rows_.end(), first_row,
                                 [](const faser::BranchRow& b, int row) { return b.row < row; });
  for (int row = first_row; row < end_row; row++) {
    const int slot = batch.slots[row_requests_[row]], position = batch.positions[row];
    const int block =
        batch.block_table[static_cast<size_t>(slot) * batch.max_blocks_per_seq + position / tokens_per_block_];
    append(row, block, position % tokens_per_block_);
    for (; branch != branch_rows_.end() && branch->row == row; ++branch) append(row, branch->block, branch->offset);
  }
}

void faser_engine::attend_rows(const Team& team, const faser_batch& batch, int layer) {
  if (team.id == 0) tile_counters_[layer % 2].reset();
  team.sync();
  append_rows(team, batch, layer);
  team.sync();
  attend(team, batch, layer);
  team.sync();
}

void faser_engine::finish_layer(const Team& team, const faser_batch& batch, int layer) {
  const faser_layer& weights = layers_[layer];
  const faser::LayerVectors& vectors = vectors_[layer];
  const int num_rows = batch.num_rows;
  const int hidden_panels = num_panels(model_.hidden_size);
  attend_rows(team, batch, layer);

  const faser::Matrix o_weights = layer_matrix(weights.o, weights.o_scales, heads_.num_heads * heads_.head_dim);
  quantize_rows(team, num_rows, o_weights, x_attention_, attention_pairs_);
  const Gemm o = product(o_weights, vectors.o_bias, x_attention_, attention_pairs_, num_rows);
  kernels_.gemm_add(o, team.begin(hidden_panels), team.end(hidden_panels), hidden_, hidden_stride_);
  team.sync();
  if (experts_.num_experts > 0) return run_experts(team, num_rows, layer);
  const faser::Matrix gate_up_weights = layer_matrix(weights.gate_up, weights.gate_up_scales, model_.hidden_size);
  norm_rows(team, num_rows, nullptr, vectors.post_norm, gate_up_weights);
  const int mlp_panels = mlp_size_ / kPanel;
  const Gemm gate_up = product(gate_up_weights, vectors.gate_up_bias, x_hidden_, hidden_pairs_, num_rows);
  kernels_.gemm_swiglu(gate_up, team.begin(mlp_panels), team.end(mlp_panels), mlp_panels, x_mlp_, mlp_pairs_);
  team.sync();
  const faser::Matrix down_weights = layer_matrix(weights.down, weights.down_scales, model_.intermediate_size);
  quantize_rows(team, num_rows, down_weights, x_mlp_, mlp_pairs_);
  const Gemm down = product(down_weights, vectors.down_bias, x_mlp_, mlp_pairs_, num_rows);
  kernels_.gemm_add(down, team.begin(hidden_panels), team.end(hidden_panels), hidden_, hidden_stride_);
  team.sync();
}

void faser_engine::run_head(const Team& team, const int32_t* logit_rows, int num_logit_rows, float* logits) {
  norm_rows(team, num_logit_rows, logit_rows, final_norm_, lm_head());
  const int panels = num_panels(num_outputs_);
  const Gemm head = product(lm_head(), nullptr, x_hidden_, hidden_pairs_, num_logit_rows);
  float* out = output_ids_ != nullptr ? output_logits_ : logits;
  kernels_.gemm(head, team.begin(panels), team.end(panels), out, round_up(num_outputs_, kPanel));
  if (output_ids_ == nullptr) return;
  team.sync();
  spread_logits(team, num_logit_rows, logits);
}

int32_t faser_engine::forward(const faser_batch& batch, int first_layer, int last_layer, const int32_t* logit_rows,
                              int num_logit_rows, float* logits, const faser::HeadRows* kept) {
  const int32_t status = check(batch, first_layer, last_layer, logit_rows, num_logit_rows);
  if (status != FASER_OK) return status;
  const bool is_last = last_layer == model_.num_layers;
  if (is_last && num_logit_rows > 0 && logits == nullptr) return FASER_BAD_ARGUMENT;
  if (is_head() && (target_ == nullptr || first_layer > 0 || !is_last)) return FASER_BAD_ARGUMENT;
  if (is_block() && num_logit_rows > 0) return FASER_BAD_ARGUMENT;
  const faser::HeadRows first_drafts = {logit_rows, entries_.data(), num_logit_rows, false};
  if (has_medusa_ && kept == nullptr) {
    if (num_logit_rows > max_num_requests_) return FASER_BAD_ARGUMENT;
    kept = &first_drafts;
  }
  if (first_layer == 0) pairs_.num_distinct = pairs_.num_layers = 0;
  plan_tiles(batch);
  plan_branches(batch);
  if (has_medusa_) plan_medusa(*kept, num_logit_rows);
  if (batch.num_rows > 0) {
    const int num_layers = last_layer - first_layer;
    const int64_t work = work_of(batch.num_rows, num_layers, is_last ? num_logit_rows : 0);
    run_timed(batch.num_rows, work, num_layers, [&](const Team& team) {
      if (has_medusa_) {
        run_medusa(team, batch, *kept, num_logit_rows, logits);
        return;
      }
      begin_rows(team, batch, first_layer == 0 && !is_block());
      if (is_block()) {
        run_context(team, batch);
      } else if (has_head_) {
        run_head_layers(team, batch, kept);
      } else {
        for (int layer = first_layer; layer < last_layer; layer++) {
          capture_rows(team, batch, layer);
          run_layer(team, batch, layer);
        }
        if (is_last) capture_rows(team, batch, last_layer);
      }
      if (is_last && num_logit_rows > 0) run_head(team, logit_rows, num_logit_rows, logits);
    });
  }
  next_layer_ = is_last ? -1 : last_layer;
  num_hidden_rows_ = batch.num_rows;
  return FASER_OK;
}
