// A block drafter's layers with convolutions over the block's rows (DFlash2).
#include "engine.h"

using faser::Gemm;
using faser::kPanel;
using faser::num_pairs;
using faser::num_panels;
using faser::Team;

// Computes the rows' normed values and the deltas of their convolution, then the convolved values in x_hidden_.
void faser_engine::prepare_conv(const Team& team, int num_rows, const float* norm, const faser_conv& conv) {
  const int hidden_size = model_.hidden_size, first = team.begin(num_rows), end = team.end(num_rows);
  for (int row = first; row < end; row++) {
    char* x = pairs(x_hidden_, row, hidden_pairs_);
    kernels_.norm_row(hidden_ + static_cast<size_t>(row) * hidden_stride_, norm, hidden_size, hidden_stride_,
                      model_.rms_norm_eps, x);
    faser::read_pairs(x, hidden_size, pair_bytes_, values_ + static_cast<size_t>(row) * hidden_stride_);
  }
  team.sync();
  const Gemm deltas = {
      {conv.delta, nullptr, 16, 0, num_pairs(hidden_size)}, nullptr, x_hidden_, hidden_pairs_, num_rows};
  const int panels = delta_stride_ / kPanel;
  kernels_.gemm(deltas, team.begin(panels), team.end(panels), deltas_, delta_stride_);
  team.sync();
  for (int row = first; row < end; row++) {
    float* out = convolved_ + static_cast<size_t>(row) * hidden_stride_;
    convolve_row(conv, 0, row, out);
    kernels_.round_row(out, hidden_size, pairs(x_hidden_, row, hidden_pairs_));
  }
  team.sync();
}

// Convolves one row of values_ to out.
void faser_engine::convolve_row(const faser_conv& conv, int side, int row, float* out) const {
  const int hidden_size = model_.hidden_size, group = block_.conv_group_size, num_groups = hidden_size / group;
  const int taps = std::min(block_.conv_taps, row % block_.block_size + 1);
  for (int tap = 0; tap < taps; tap++) {
    const int at = side * block_.conv_taps + tap;
    const float* base = conv.base + static_cast<size_t>(at) * hidden_size;
    const float* delta = deltas_ + static_cast<size_t>(row) * delta_stride_ + static_cast<size_t>(at) * num_groups;
    const float* in = values_ + static_cast<size_t>(row - tap) * hidden_stride_;
    for (int i = 0; i < hidden_size; i++) {
      const float term = (base[i] + delta[i / group]) * in[i];
      out[i] = tap == 0 ? term : out[i] + term;
    }
  }
}

void faser_engine::run_conv_layer(const Team& team, const faser_batch& batch, int layer) {
  const faser_layer& weights = layers_[layer];
  const faser::LayerVectors& vectors = vectors_[layer];
  const int num_rows = batch.num_rows, first = team.begin(num_rows), end = team.end(num_rows);
  const int hidden_panels = num_panels(model_.hidden_size);
  // Convolves a sublayer's output in values_ and adds it to the hidden rows.
  const auto finish = [&](const faser_conv& conv) {
    team.sync();
    for (int row = first; row < end; row++) {
      float* out = convolved_ + static_cast<size_t>(row) * hidden_stride_;
      float* hidden = hidden_ + static_cast<size_t>(row) * hidden_stride_;
      convolve_row(conv, 1, row, out);
      for (int i = 0; i < model_.hidden_size; i++) hidden[i] += out[i];
    }
    team.sync();
  };
  prepare_conv(team, num_rows, vectors.input_norm, attention_convs_[layer]);
  const int qkv_panels = qkv_stride_ / kPanel;
  const Gemm qkv = {layer_matrix(weights.qkv, nullptr, model_.hidden_size), vectors.qkv_bias, x_hidden_, hidden_pairs_,
                    num_rows};
  kernels_.gemm(qkv, team.begin(qkv_panels), team.end(qkv_panels), qkv_, qkv_stride_);
  attend_rows(team, batch, layer);
  const Gemm o = {layer_matrix(weights.o, nullptr, heads_.num_heads * heads_.head_dim), vectors.o_bias, x_attention_,
                  attention_pairs_, num_rows};
  kernels_.gemm(o, team.begin(hidden_panels), team.end(hidden_panels), values_, hidden_stride_);
  finish(attention_convs_[layer]);

  prepare_conv(team, num_rows, vectors.post_norm, mlp_convs_[layer]);
  const int mlp_panels = mlp_size_ / kPanel;
  const Gemm gate_up = {layer_matrix(weights.gate_up, nullptr, model_.hidden_size), vectors.gate_up_bias, x_hidden_,
                        hidden_pairs_, num_rows};
  kernels_.gemm_swiglu(gate_up, team.begin(mlp_panels), team.end(mlp_panels), mlp_panels, x_mlp_, mlp_pairs_);
  team.sync();
  const Gemm down = {layer_matrix(weights.down, nullptr, model_.intermediate_size), vectors.down_bias, x_mlp_,
                     mlp_pairs_, num_rows};
  kernels_.gemm(down, team.begin(hidden_panels), team.end(hidden_panels), values_, hidden_stride_);
  finish(mlp_convs_[layer]);
}
