// Models of random sizes and weights for the CPU engine, in memory of just the sizes that faser_cpu.h asks for, so that
// a sanitizer sees each access beyond a tensor.
#ifndef FASER_RANDOM_MODEL_H_
#define FASER_RANDOM_MODEL_H_

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "faser_cpu.h"
#include "input.h"

enum class ModelKind { kDecoder, kEagle, kMtp, kMedusa, kBlock };

class RandomModel {
 public:
  // Sizes are read from the input, weights are drawn. target: of a head; it shares its vocabulary and hidden size.
  RandomModel(FuzzInput& input, ModelKind kind, const faser_model* target = nullptr, bool is_large = false)
      : random_(input.take<uint16_t>()) {
    faser_model& m = model;
    std::memset(&m, 0, sizeof(m));
    const int dims[] = {2, 16, 32, 34, 64, 128};
    m.weight_bits =
        kind == ModelKind::kMedusa || kind == ModelKind::kBlock ? 16 : std::vector<int>{16, 8, 4}[input.in(0, 2)];
    m.group_size = m.weight_bits == 16 ? 0 : std::vector<int>{m.weight_bits == 8 ? 0 : 32, 32, 128}[input.in(0, 2)];
    m.activation_bits = m.weight_bits != 16 && kind == ModelKind::kDecoder && input.flag() ? 8 : 16;
    m.num_layers = kind == ModelKind::kMedusa || kind == ModelKind::kMtp ? 1 : input.in(1, 3);
    m.num_kv_heads = input.in(1, 3);
    m.num_heads = m.num_kv_heads * input.in(1, 5);
    m.head_dim = dims[input.in(0, is_large ? 5 : 3)];
    m.hidden_size = target != nullptr ? target->hidden_size : 2 * input.in(1, is_large ? 200 : 40);
    m.intermediate_size = input.in(1, is_large ? 250 : 80);
    m.vocab_size = target != nullptr ? target->vocab_size : input.in(1, 150) * (is_large ? 20 : 1);
    if (m.group_size != 0) {  // groups divide every matrix's inputs
      const auto to_group = [&m](int n) { return (n + m.group_size - 1) / m.group_size * m.group_size; };
      if (target != nullptr && m.hidden_size % m.group_size != 0) m.group_size = 0, m.weight_bits = 8;
      if (m.group_size != 0) {
        m.hidden_size = to_group(m.hidden_size);
        m.intermediate_size = to_group(m.intermediate_size);
        if (m.head_dim % m.group_size != 0) m.head_dim = m.group_size;
      }
    }
    experts_.is_mxfp4 = kind == ModelKind::kDecoder && m.weight_bits == 16 && input.in(0, 3) == 0;
    if (experts_.is_mxfp4) {
      m.hidden_size = (m.hidden_size + 31) / 32 * 32;
      m.intermediate_size = (m.intermediate_size + 31) / 32 * 32;
    }
    m.max_seq_len = input.in(1, 120);
    const bool may_have_window = kind == ModelKind::kDecoder || kind == ModelKind::kEagle;
    if (may_have_window && input.in(0, 3) == 0) m.windows = windows(input, 40);
    m.rms_norm_eps = 1e-5f;
    m.rope_attention_factor = 1.0f;
    m.rope_inv_freq = floats(m.head_dim / 2, 1.0f);
    m.final_norm = floats(m.hidden_size, 1.0f);
    const bool is_tied = kind == ModelKind::kDecoder && input.flag();
    if (!is_tied)
      m.embedding = reinterpret_cast<const uint16_t*>(bf16(static_cast<size_t>(m.vocab_size) * m.hidden_size));
    // num_features of an EAGLE-3 head and its layers follow the target's.
    if (kind == ModelKind::kEagle || kind == ModelKind::kMtp) make_head(input, kind, *target);
    if (kind == ModelKind::kBlock) make_block(input, *target);
    int num_lm_heads = 1;
    if (kind == ModelKind::kMedusa) {
      medusa_.num_heads = num_lm_heads = input.in(1, 3);
      medusa_.num_layers = input.in(1, 2);
      const int num_blocks = medusa_.num_heads * medusa_.num_layers;
      medusa_.residual = packed(num_blocks * padded(m.hidden_size), m.hidden_size, 16);
      medusa_.residual_bias = floats(num_blocks * padded(m.hidden_size), 0.1f);
      m.medusa = &medusa_;
      layers_.resize(1);
    } else {
      for (int i = 0; i < m.num_layers; ++i) add_layer(input, kind);
    }
    m.layers = layers_.data();
    if (kind == ModelKind::kDecoder && (input.flag() || experts_.is_mxfp4)) make_experts(input);
    const bool is_foreign = kind == ModelKind::kDecoder && !is_tied && input.flag();
    if (is_foreign) {
      m.num_outputs = 1 + m.vocab_size / 2;
      int32_t* const ids = allocate<int32_t>(m.num_outputs);
      for (int i = 0; i < m.num_outputs; ++i) ids[i] = i + m.vocab_size - m.num_outputs;
      m.output_ids = ids;
    }
    const int num_tokens = is_foreign ? m.num_outputs : m.vocab_size;
    if (kind == ModelKind::kDecoder && m.weight_bits != 16 && input.flag()) {
      m.lm_head = packed(num_tokens, m.hidden_size, m.weight_bits);
      m.lm_head_scales = scales(num_tokens, m.hidden_size);
    } else {
      const int num_out = m.head != nullptr ? head_.draft_vocab_size : num_tokens;
      m.lm_head = packed(num_lm_heads * (num_lm_heads > 1 ? padded(num_out) : num_out), m.hidden_size, 16);
    }
  }
  RandomModel(const RandomModel&) = delete;
  RandomModel& operator=(const RandomModel&) = delete;

  faser_model model;
  std::vector<int32_t> target_layers;  // that a head reads

 private:
  static int padded(int n) { return (n + FASER_PANEL - 1) / FASER_PANEL * FASER_PANEL; }

  template <typename T>
  T* allocate(size_t count) {
    void* data = nullptr;
    if (posix_memalign(&data, 64, count * sizeof(T)) != 0) std::abort();
    memory_.emplace_back(data);
    return static_cast<T*>(data);
  }
  float* floats(size_t count, float size) {
    float* const data = allocate<float>(count);
    for (size_t i = 0; i < count; ++i) data[i] = size * (static_cast<float>(random_() % 2001) / 1000.0f - 1.0f);
    return data;
  }
  // Numbers of bf16 up to 0.5.
  uint32_t* bf16(size_t count) {
    uint32_t* const data = allocate<uint32_t>(count / 2 + 1);
    for (size_t i = 0; i < count / 2 + 1; ++i) data[i] = (random_() & 0x80ff80ffu) | 0x3d003d00u;
    return data;
  }
  uint32_t* packed(int num_out, int num_in, int bits) {
    const size_t count = static_cast<size_t>(padded(num_out)) * ((num_in + 31) / 32 * 32);
    if (bits == 16) {
      uint32_t* const data = allocate<uint32_t>(count / 2);
      for (size_t i = 0; i < count / 2; ++i) data[i] = (random_() & 0x80ff80ffu) | 0x3d003d00u;
      return data;
    }
    uint32_t* const data = allocate<uint32_t>(count * bits / 32);
    for (size_t i = 0; i < count * bits / 32; ++i) data[i] = random_();
    return data;
  }
  float* scales(int num_out, int num_in) { return scales(num_out, num_in, model.group_size); }
  float* scales(int num_out, int num_in, int group_size) {
    return floats(static_cast<size_t>(padded(num_out)) * (group_size != 0 ? num_in / group_size : 1), 0.01f);
  }
  int32_t* windows(FuzzInput& input, int most) {
    int32_t* const data = allocate<int32_t>(model.num_layers);
    for (int i = 0; i < model.num_layers; ++i) data[i] = input.in(0, most);
    return data;
  }
  float* optional(FuzzInput& input, int count) { return input.flag() ? floats(count, 0.2f) : nullptr; }

  void add_layer(FuzzInput& input, ModelKind kind) {
    const faser_model& m = model;
    faser_layer layer{};
    const int q_size = m.num_heads * m.head_dim, qkv_size = q_size + 2 * m.num_kv_heads * m.head_dim;
    const bool is_first_of_eagle = kind == ModelKind::kEagle && layers_.empty();
    const int mlp = padded(m.intermediate_size), num_in = (is_first_of_eagle ? 2 : 1) * m.hidden_size;
    const int bits = m.weight_bits;
    layer.input_norm = floats(m.hidden_size, 1.0f);
    layer.qkv = packed(qkv_size, num_in, bits);
    layer.qkv_bias = optional(input, qkv_size);
    layer.q_norm = optional(input, m.head_dim);
    layer.k_norm = optional(input, m.head_dim);
    layer.o = packed(m.hidden_size, q_size, bits);
    layer.o_bias = optional(input, m.hidden_size);
    if (kind == ModelKind::kDecoder) layer.sinks = optional(input, m.num_heads);
    layer.post_norm = floats(m.hidden_size, 1.0f);
    layer.gate_up = packed(2 * mlp, m.hidden_size, bits);
    layer.gate_up_bias = optional(input, 2 * mlp);
    layer.down = packed(m.hidden_size, m.intermediate_size, bits);
    layer.down_bias = optional(input, m.hidden_size);
    if (bits != 16) {
      layer.qkv_scales = scales(qkv_size, num_in);
      layer.o_scales = scales(m.hidden_size, q_size);
      layer.gate_up_scales = scales(2 * mlp, m.hidden_size);
      layer.down_scales = scales(m.hidden_size, m.intermediate_size);
    }
    layers_.push_back(layer);
  }

  // Experts in the place of each layer's MLP.
  void make_experts(FuzzInput& input) {
    const faser_model& m = model;
    faser_experts& experts = experts_;
    experts.num_experts = input.in(1, 70);
    experts.top_k = 1 + input.in(0, std::min(experts.num_experts, 9) - 1);
    experts.scoring = input.flag() ? FASER_SOFTMAX : FASER_TOP_K_SOFTMAX;
    experts.norm_topk = input.flag();
    experts.activation = input.flag() ? FASER_SILU : FASER_CLAMPED;
    if (input.flag()) experts.shared_size = m.group_size != 0 ? m.group_size : input.in(1, 100);
    const int count = experts.num_experts, mlp = padded(m.intermediate_size), hidden = padded(m.hidden_size);
    const int shared = padded(experts.shared_size), bits = m.weight_bits, expert_bits = experts.is_mxfp4 ? 4 : bits;
    for (faser_layer& layer : layers_) {
      const bool has_bias = input.flag();
      layer.router = packed(count, m.hidden_size, 16);
      layer.router_bias = has_bias ? floats(count, 0.2f) : nullptr;
      layer.gate_up = packed(count * 2 * mlp, m.hidden_size, expert_bits);
      layer.gate_up_bias = has_bias ? floats(static_cast<size_t>(count) * 2 * mlp, 0.2f) : nullptr;
      layer.down = packed(count * hidden, m.intermediate_size, expert_bits);
      layer.down_bias = has_bias ? floats(static_cast<size_t>(count) * hidden, 0.2f) : nullptr;
      if (expert_bits != 16) {
        const int group_size = experts.is_mxfp4 ? 32 : m.group_size;
        layer.gate_up_scales = scales(count * 2 * mlp, m.hidden_size, group_size);
        layer.down_scales = scales(count * hidden, m.intermediate_size, group_size);
      }
      if (experts.shared_size == 0) continue;
      layer.shared_gate_up = packed(2 * shared, m.hidden_size, bits);
      layer.shared_down = packed(m.hidden_size, experts.shared_size, bits);
      layer.shared_gate = packed(1, m.hidden_size, 16);
      if (bits != 16) {
        layer.shared_gate_up_scales = scales(2 * shared, m.hidden_size);
        layer.shared_down_scales = scales(m.hidden_size, experts.shared_size);
      }
    }
    model.experts = &experts_;
  }

  void make_head(FuzzInput& input, ModelKind kind, const faser_model& target) {
    faser_head& head = head_;
    const bool is_mtp = kind == ModelKind::kMtp;
    head.reads_normed = is_mtp && input.flag();
    const int num_layers = is_mtp ? 1 : input.in(1, target.num_layers);
    for (int i = 0; i < num_layers; ++i) target_layers.push_back(target.num_layers - num_layers + i + 1);
    head.num_features = num_layers * target.hidden_size;
    head.draft_vocab_size = !is_mtp && input.flag() ? 1 + model.vocab_size / 2 : model.vocab_size;
    if (head.draft_vocab_size < model.vocab_size) {
      int32_t* const ids = allocate<int32_t>(head.draft_vocab_size);
      for (int i = 0; i < head.draft_vocab_size; ++i) ids[i] = i;
      head.target_ids = ids;
    }
    head.hidden_norm = floats(model.hidden_size, 1.0f);
    head.norm_before_residual = input.flag();
    if (is_mtp) {
      head.input_proj = packed(model.hidden_size, 2 * model.hidden_size, 16);
      head.token_norm = floats(model.hidden_size, 1.0f);
    } else {
      head.fc = packed(model.hidden_size, head.num_features, 16);
      head.fc_bias = optional(input, model.hidden_size);
      head.feeds_normed = input.flag();
      head.num_fc_norms = std::vector<int>{0, 1, num_layers}[input.in(0, 2)];
      if (head.num_fc_norms > 0) head.fc_norm = floats(head.num_features, 1.0f);
    }
    model.head = &head_;
  }

  void make_block(FuzzInput& input, const faser_model& target) {
    faser_block& block = block_;
    const int num_layers = input.in(1, target.num_layers), hidden = model.hidden_size, vocab = model.vocab_size;
    for (int i = 0; i < num_layers; ++i) target_layers.push_back(target.num_layers - num_layers + i + 1);
    block.num_features = num_layers * target.hidden_size;
    block.fc = packed(hidden, block.num_features, 16);
    block.hidden_norm = floats(hidden, 1.0f);
    block.first_slot = input.in(0, 1);
    block.block_size = block.first_slot + input.in(1, 7);
    block.mask_token_id = input.in(0, vocab - 1);
    model.windows = windows(input, 9);
    int32_t* const causal = allocate<int32_t>(model.num_layers);
    for (int i = 0; i < model.num_layers; ++i) causal[i] = input.flag();
    block.causal = causal;
    block.logit_softcap = input.flag() ? 5.0f : 0.0f;
    block.logit_scale = block.embedding_scale = 0.5f;
    const auto rows_of = [&](int rank) {
      return reinterpret_cast<const uint16_t*>(bf16(static_cast<size_t>(vocab) * rank));
    };
    if (input.flag()) {
      block.markov_rank = 2 * input.in(1, 20);
      block.markov_in = rows_of(block.markov_rank);
      block.markov_out = packed(vocab, block.markov_rank, 16);
    }
    if (input.flag()) {
      block.selector_rank = input.in(1, 40);
      block.selector_top_k = input.in(1, std::min(vocab, 20));
      block.predecessors = rows_of(block.selector_rank);
      block.successors = rows_of(block.selector_rank);
      block.selector_proj = packed(block.selector_rank, hidden, 16);
    }
    if (input.flag()) {
      block.conv_taps = input.in(1, 3);
      block.conv_group_size = input.flag() ? 2 : hidden;
      const int num_deltas = 2 * block.conv_taps * hidden / block.conv_group_size;
      for (int i = 0; i < 2 * model.num_layers; ++i)
        convs_.push_back(
            {floats(static_cast<size_t>(2) * block.conv_taps * hidden, 1.0f), packed(num_deltas, hidden, 16)});
      block.attention_convs = convs_.data();
      block.mlp_convs = convs_.data() + model.num_layers;
    }
    model.block = &block_;
  }

  struct Free {
    void operator()(void* data) const { std::free(data); }
  };

  std::mt19937 random_;
  std::vector<std::unique_ptr<void, Free>> memory_;
  std::vector<faser_layer> layers_;
  faser_experts experts_{};
  faser_head head_{};
  faser_medusa medusa_{};
  faser_block block_{};
  std::vector<faser_conv> convs_;
};

#endif  // FASER_RANDOM_MODEL_H_
