// Checks a model before an engine is made of it: the sizes that index memory, and the tensors that it needs.
#include "model_check.h"

#include "engine.h"

namespace faser {
namespace {

bool is_valid_head(const faser_model& model) {
  const faser_head& head = *model.head;
  if (model.embedding == nullptr || head.hidden_norm == nullptr || head.num_features < 2 ||
      head.num_features % 2 != 0 || head.draft_vocab_size < 1)
    return false;
  if (head.fc == nullptr &&
      (model.num_layers != 1 || (model.windows != nullptr && model.windows[0] != 0) || head.input_proj == nullptr ||
       head.token_norm == nullptr || head.num_features != model.hidden_size))
    return false;
  if (head.num_fc_norms < 0 || (head.num_fc_norms > 0) != (head.fc_norm != nullptr)) return false;
  if (head.fc_norm != nullptr && (head.fc == nullptr || head.num_features % (2 * head.num_fc_norms) != 0)) return false;
  if (head.target_ids == nullptr) return head.draft_vocab_size == model.vocab_size;
  for (int i = 0; i < head.draft_vocab_size; i++)
    if (head.target_ids[i] < 0 || head.target_ids[i] >= model.vocab_size) return false;
  return true;
}

bool is_valid_block(const faser_model& model) {
  const faser_block& block = *model.block;
  if (block.fc == nullptr || block.hidden_norm == nullptr || block.causal == nullptr || block.num_features < 2 ||
      block.num_features % 2 != 0 || block.first_slot < 0 || block.first_slot > 1 ||
      block.block_size <= block.first_slot || block.mask_token_id < 0 || block.mask_token_id >= model.vocab_size ||
      block.markov_rank < 0 || block.markov_rank % 2 != 0 || block.logit_softcap < 0.0f)
    return false;
  if (block.markov_rank > 0 && (block.markov_in == nullptr || block.markov_out == nullptr)) return false;
  if (block.selector_rank < 0 || block.selector_top_k < 0 || block.selector_top_k > kMaxSelected ||
      block.conv_taps < 0 || block.conv_group_size < 0)
    return false;
  if (block.selector_rank > 0 &&
      (block.selector_top_k < 1 || block.selector_top_k > model.vocab_size || block.predecessors == nullptr ||
       block.successors == nullptr || block.selector_proj == nullptr))
    return false;
  if (block.conv_taps > 0 && (block.conv_group_size < 1 || model.hidden_size % block.conv_group_size != 0 ||
                              block.attention_convs == nullptr || block.mlp_convs == nullptr))
    return false;
  for (int i = 0; i < model.num_layers; i++) {
    for (const faser_conv* convs : {block.attention_convs, block.mlp_convs})
      if (block.conv_taps > 0 && (convs[i].base == nullptr || convs[i].delta == nullptr)) return false;
  }
  return true;
}

bool has_valid_experts(const faser_model& model) {
  if (model.experts == nullptr) return true;
  const faser_experts& experts = *model.experts;
  if (model.head != nullptr || model.medusa != nullptr || model.block != nullptr || experts.top_k < 1 ||
      experts.num_experts < experts.top_k || experts.num_experts > kMaxExperts || experts.shared_size < 0 ||
      (experts.scoring != FASER_SOFTMAX && experts.scoring != FASER_TOP_K_SOFTMAX) ||
      (experts.activation != FASER_SILU && experts.activation != FASER_CLAMPED))
    return false;
  if (model.group_size != 0 && experts.shared_size % model.group_size != 0) return false;
  const bool is_quantized = model.weight_bits != 16;
  if (experts.is_mxfp4 != 0 && (is_quantized || model.hidden_size % 32 != 0 || model.intermediate_size % 32 != 0))
    return false;
  for (int i = 0; i < model.num_layers; i++) {
    const faser_layer& layer = model.layers[i];
    if (layer.router == nullptr) return false;
    if (experts.is_mxfp4 != 0 && (layer.gate_up_scales == nullptr || layer.down_scales == nullptr)) return false;
    if (experts.shared_size == 0) continue;
    if (layer.shared_gate_up == nullptr || layer.shared_down == nullptr || layer.shared_gate == nullptr) return false;
    if (is_quantized && (layer.shared_gate_up_scales == nullptr || layer.shared_down_scales == nullptr)) return false;
  }
  return true;
}

// Requires a decoder with an embedding, and no token twice.
bool has_valid_outputs(const faser_model& model) {
  if (model.output_ids == nullptr) return true;
  if (model.head != nullptr || model.medusa != nullptr || model.block != nullptr || model.embedding == nullptr ||
      model.num_outputs < 1)
    return false;
  for (int i = 0; i < model.num_outputs; i++)
    if (model.output_ids[i] < (i > 0 ? model.output_ids[i - 1] + 1 : 0) || model.output_ids[i] >= model.vocab_size)
      return false;
  return true;
}

}  // namespace

bool is_valid(const faser_model& model) {
  const bool sizes = model.num_layers > 0 && model.hidden_size > 0 && model.hidden_size % 2 == 0 &&
                     model.num_heads > 0 && model.num_kv_heads > 0 && model.num_heads % model.num_kv_heads == 0 &&
                     model.head_dim > 0 && model.head_dim % 2 == 0 && model.head_dim <= kMaxHeadDim &&
                     model.intermediate_size > 0 && model.vocab_size > 0 && model.max_seq_len > 0;
  const int group_size = model.group_size;
  if (model.norms_all_heads != 0 && model.num_kv_heads * model.head_dim % 16 != 0) return false;
  const bool is_quantized = model.weight_bits != 16;
  if (model.weight_bits != 16 && model.weight_bits != 8 && model.weight_bits != 4) return false;
  if (group_size != 0 && group_size != 32 && group_size != 128) return false;
  if (group_size == 0 && model.weight_bits == 4) return false;
  if (model.activation_bits != 16 &&
      (model.activation_bits != 8 || !is_quantized || model.head != nullptr || model.medusa != nullptr))
    return false;
  if (group_size != 0 &&
      (!is_quantized || model.hidden_size % group_size != 0 || model.num_heads * model.head_dim % group_size != 0 ||
       model.intermediate_size % group_size != 0))
    return false;
  if (!sizes || model.lm_head == nullptr || model.layers == nullptr || !has_valid_outputs(model) ||
      !has_valid_experts(model))
    return false;
  if (model.medusa != nullptr)
    return model.num_layers == 1 && model.head == nullptr && !is_quantized && model.medusa->residual != nullptr &&
           model.medusa->residual_bias != nullptr && model.medusa->num_heads > 0 && model.medusa->num_layers > 0;
  if (model.rope_inv_freq == nullptr || model.final_norm == nullptr) return false;
  for (int i = 0; i < model.num_layers; i++) {
    const faser_layer& layer = model.layers[i];
    if (model.windows != nullptr && model.windows[i] < 0) return false;
    if (model.norms_all_heads != 0 && (layer.q_norm == nullptr || layer.k_norm == nullptr)) return false;
    if (layer.input_norm == nullptr || layer.qkv == nullptr || layer.o == nullptr || layer.post_norm == nullptr ||
        layer.gate_up == nullptr || layer.down == nullptr)
      return false;
    if (is_quantized && (layer.qkv_scales == nullptr || layer.o_scales == nullptr || layer.gate_up_scales == nullptr ||
                         layer.down_scales == nullptr))
      return false;
  }
  if (model.block != nullptr) return model.head == nullptr && !is_quantized && is_valid_block(model);
  return model.head == nullptr || is_valid_head(model);
}

}  // namespace faser
