// A block drafter: context rows, of which keys and values are kept, and blocks, whose rows yield the drafts'
// distributions.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "engine.h"

using faser::Gemm;
using faser::kPanel;
using faser::num_pairs;
using faser::num_panels;
using faser::Team;

namespace faser {

BlockMemory::BlockMemory(int max_num_requests, int block_size, int max_seq_len, int tokens_per_block)
    : max_num_requests(max_num_requests),
      blocks_per_request((tokens_per_block + block_size - 2) / tokens_per_block + 1),
      max_blocks_per_seq((max_seq_len - 1) / tokens_per_block + blocks_per_request),
      slots(max_num_requests),
      cu_rows(max_num_requests + 1),
      token_ids(static_cast<size_t>(max_num_requests) * block_size),
      positions(token_ids.size()),
      logit_rows(token_ids.size()),
      table(static_cast<size_t>(max_num_requests) * max_blocks_per_seq) {
  std::iota(slots.begin(), slots.end(), 0);
  for (size_t i = 0; i < cu_rows.size(); i++) cu_rows[i] = static_cast<int32_t>(i) * block_size;
}

}  // namespace faser

// Computes the rows' features, and their keys and values for every layer.
void faser_engine::run_context(const Team& team, const faser_batch& batch) {
  const int num_rows = batch.num_rows, hidden_size = model_.hidden_size;
  const int first = team.begin(num_rows), end = team.end(num_rows);
  const size_t num_bytes = static_cast<size_t>(block_.num_features / 2) * pair_bytes_;
  for (int row = first; row < end; row++) {
    const size_t token = token_index(batch, row_requests_[row], batch.positions[row]);
    std::memcpy(pairs(x_features_, row, feature_pairs_), target_->captured_ + token * num_bytes, num_bytes);
  }
  team.sync();
  const int hidden_panels = num_panels(hidden_size);
  const Gemm fc = {
      {block_.fc, nullptr, 16, 0, num_pairs(block_.num_features)}, nullptr, x_features_, feature_pairs_, num_rows};
  kernels_.gemm(fc, team.begin(hidden_panels), team.end(hidden_panels), hidden_, hidden_stride_);
  team.sync();
  for (int row = first; row < end; row++)
    kernels_.norm_row(hidden_ + static_cast<size_t>(row) * hidden_stride_, hidden_norm_, hidden_size, hidden_stride_,
                      model_.rms_norm_eps, pairs(x_hidden_, row, hidden_pairs_));
  team.sync();
  // Queries come first in qkv; the panel in which keys begin may have some of them.
  const int first_panel = heads_.num_heads * heads_.head_dim / kPanel, panels = qkv_stride_ / kPanel - first_panel;
  for (int layer = 0; layer < model_.num_layers; layer++) {
    const Gemm qkv = {layer_matrix(layers_[layer].qkv, nullptr, hidden_size), vectors_[layer].qkv_bias, x_hidden_,
                      hidden_pairs_, num_rows};
    kernels_.gemm(qkv, first_panel + team.begin(panels), first_panel + team.end(panels), qkv_, qkv_stride_);
    team.sync();
    append_rows(team, batch, layer);
    team.sync();
  }
}

// Copies keys and values of the context in the block where a request's rows begin to the engine's own block, which
// replaces it.
void faser_engine::copy_first_blocks(const Team& team, const faser_batch& batch, const faser::BlockRows& rows) {
  const size_t page_words = static_cast<size_t>(faser::kPageTokens) * heads_.padded_dim / 2;
  const int count = rows.count * model_.num_layers;
  for (int i = team.begin(count); i < team.end(count); i++) {
    const int request = i / model_.num_layers, place = rows.positions[request] / tokens_per_block_;
    const int num_tokens = rows.positions[request] % tokens_per_block_;
    if (num_tokens == 0) continue;
    const int from = batch.block_table[static_cast<size_t>(rows.slots[request]) * batch.max_blocks_per_seq + place];
    const int to =
        memory_of_blocks_->table[static_cast<size_t>(request) * memory_of_blocks_->max_blocks_per_seq + place];
    const faser::KvLayer kv = kv_layer(i % model_.num_layers);
    const size_t num_words = static_cast<size_t>((num_tokens - 1) / faser::kPageTokens + 1) * page_words;
    for (int head = 0; head < 2 * heads_.num_kv_heads; head++) {  // for each head its keys, then its values
      const size_t at = head / 2 * kv.head_stride + head % 2 * kv.value_offset;
      std::memcpy(kv.base + to * kv.block_stride + at, kv.base + from * kv.block_stride + at,
                  sizeof(uint32_t) * num_words);
    }
  }
}

// Scales logits as for drawing drafts; the mask token cannot be drawn.
void faser_engine::finish_logits(const Team& team, int num_rows, float* logits) const {
  for (int i = team.begin(num_rows); i < team.end(num_rows); i++) {
    float* row = logits + static_cast<size_t>(i) * logits_stride();
    if (block_.logit_scale != 1.0f)
      for (int j = 0; j < model_.vocab_size; j++) row[j] *= block_.logit_scale;
    if (block_.logit_softcap != 0.0f)
      for (int j = 0; j < model_.vocab_size; j++)
        row[j] = block_.logit_softcap * std::tanh(row[j] / block_.logit_softcap);
    row[block_.mask_token_id] = -std::numeric_limits<float>::infinity();
  }
}

int32_t faser_engine::plan_blocks(const faser_batch& batch, const faser::BlockRows& rows) {
  faser::BlockMemory& memory = *memory_of_blocks_;
  const int first_own = num_blocks_, size = block_.block_size;
  for (int i = 0; i < rows.count; i++) {
    const int position = rows.positions[i], place = position / tokens_per_block_;
    if (position < 0 || position >= model_.max_seq_len) return FASER_BAD_POSITION;
    if (rows.token_ids[i] < 0 || rows.token_ids[i] >= model_.vocab_size) return FASER_BAD_TOKEN;
    const int num_shared = place + (position % tokens_per_block_ > 0 ? 1 : 0);
    if (num_shared > batch.max_blocks_per_seq) return FASER_BAD_POSITION;
    const int32_t* shared = batch.block_table + static_cast<size_t>(rows.slots[i]) * batch.max_blocks_per_seq;
    int32_t* table = memory.table.data() + static_cast<size_t>(i) * memory.max_blocks_per_seq;
    for (int b = 0; b < num_shared; b++) {
      if (shared[b] < 0 || shared[b] >= num_blocks_) return FASER_BAD_BLOCK;
      table[b] = shared[b];
    }
    for (int b = 0; b < memory.blocks_per_request; b++)
      table[place + b] = first_own + i * memory.blocks_per_request + b;
    for (int row = 0; row < size; row++) {
      memory.positions[i * size + row] = position + row;
      memory.token_ids[i * size + row] = row == 0 ? rows.token_ids[i] : block_.mask_token_id;
    }
  }
  return FASER_OK;
}

int32_t faser_engine::draft_blocks(const faser_batch& batch, const faser::BlockRows& rows, float* logits) {
  if (rows.count > max_blocks_of_pass()) return FASER_BAD_ARGUMENT;
  if (const int32_t status = plan_blocks(batch, rows); status != FASER_OK) return status;
  faser::BlockMemory& memory = *memory_of_blocks_;
  int num_logit_rows = 0;
  for (int i = 0; i < rows.count; i++)
    for (int place = 0; place < rows.num_places[i]; place++)
      memory.logit_rows[num_logit_rows++] = i * block_.block_size + block_.first_slot + place;
  const int num_rows = rows.count * block_.block_size;
  const faser_batch block_batch = {rows.count,
                                   num_rows,
                                   memory.max_blocks_per_seq,
                                   memory.slots.data(),
                                   memory.cu_rows.data(),
                                   memory.token_ids.data(),
                                   memory.positions.data(),
                                   memory.table.data(),
                                   nullptr,
                                   0};
  plan_tiles(block_batch);
  branch_rows_.clear();
  run_timed(num_rows, work_of(num_rows, model_.num_layers, num_logit_rows), model_.num_layers, [&](const Team& team) {
    copy_first_blocks(team, batch, rows);
    begin_rows(team, block_batch, true);
    if (block_.embedding_scale != 1.0f)
      for (int row = team.begin(num_rows); row < team.end(num_rows); row++)
        for (int j = 0; j < model_.hidden_size; j++)
          hidden_[static_cast<size_t>(row) * hidden_stride_ + j] *= block_.embedding_scale;
    for (int layer = 0; layer < model_.num_layers; layer++) {
      if (block_.conv_taps > 0)
        run_conv_layer(team, block_batch, layer);
      else
        run_layer(team, block_batch, layer);
    }
    run_head(team, memory.logit_rows.data(), num_logit_rows, logits);
    if (block_.selector_rank > 0) {
      const Gemm projection = {{block_.selector_proj, nullptr, 16, 0, num_pairs(model_.hidden_size)},
                               nullptr,
                               x_hidden_,
                               hidden_pairs_,
                               num_logit_rows};
      const int panels = num_panels(block_.selector_rank);
      kernels_.gemm(projection, team.begin(panels), team.end(panels), selector_rows_, selector_stride_);
    }
    team.sync();
    finish_logits(team, num_logit_rows, logits);
  });
  next_layer_ = -1;
  return FASER_OK;
}
