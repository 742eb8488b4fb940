"""The structures of faser_cpu.h, field for field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p

NUM_SOURCES = 2


class FaserLayer(Structure):
    """struct faser_layer: addresses of one layer's weights, None where the header allows NULL."""

    _fields_ = [
        ("input_norm", c_void_p),
        ("qkv", c_void_p),
        ("qkv_bias", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("o", c_void_p),
        ("o_bias", c_void_p),
        ("post_norm", c_void_p),
        ("gate_up", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down", c_void_p),
        ("down_bias", c_void_p),
        ("qkv_scales", c_void_p),
        ("o_scales", c_void_p),
        ("gate_up_scales", c_void_p),
        ("down_scales", c_void_p),
        ("router", c_void_p),
        ("router_bias", c_void_p),
        ("shared_gate_up", c_void_p),
        ("shared_down", c_void_p),
        ("shared_gate", c_void_p),
        ("shared_gate_up_scales", c_void_p),
        ("shared_down_scales", c_void_p),
        ("sinks", c_void_p),
    ]


class FaserHead(Structure):
    """struct faser_head: the parts of an EAGLE-3 head or an MTP layer that a decoder lacks."""

    _fields_ = [
        ("fc", c_void_p),
        ("fc_bias", c_void_p),
        ("hidden_norm", c_void_p),
        ("target_ids", c_void_p),
        ("num_features", c_int32),
        ("draft_vocab_size", c_int32),
        ("norm_before_residual", c_int32),
        ("input_proj", c_void_p),
        ("token_norm", c_void_p),
        ("reads_normed", c_int32),
        ("feeds_normed", c_int32),
        ("num_fc_norms", c_int32),
        ("fc_norm", c_void_p),
    ]


class FaserMedusa(Structure):
    """struct faser_medusa: Medusa heads, which replace a decoder's layers."""

    _fields_ = [
        ("residual", c_void_p),
        ("residual_bias", c_void_p),
        ("num_heads", c_int32),
        ("num_layers", c_int32),
    ]


class FaserConv(Structure):
    """struct faser_conv: a convolution next to a sublayer of a block drafter."""

    _fields_ = [
        ("base", c_void_p),
        ("delta", c_void_p),
    ]


class FaserBlock(Structure):
    """struct faser_block: the parts of a block drafter that a decoder lacks."""

    _fields_ = [
        ("fc", c_void_p),
        ("hidden_norm", c_void_p),
        ("markov_in", c_void_p),
        ("markov_out", c_void_p),
        ("predecessors", c_void_p),
        ("successors", c_void_p),
        ("selector_proj", c_void_p),
        ("attention_convs", POINTER(FaserConv)),
        ("mlp_convs", POINTER(FaserConv)),
        ("causal", POINTER(c_int32)),
        ("num_features", c_int32),
        ("block_size", c_int32),
        ("first_slot", c_int32),
        ("mask_token_id", c_int32),
        ("markov_rank", c_int32),
        ("selector_rank", c_int32),
        ("selector_top_k", c_int32),
        ("conv_taps", c_int32),
        ("conv_group_size", c_int32),
        ("logit_softcap", c_float),
        ("logit_scale", c_float),
        ("embedding_scale", c_float),
    ]


class FaserExperts(Structure):
    """struct faser_experts: sizes of a mixture of experts."""

    _fields_ = [
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("scoring", c_int32),
        ("norm_topk", c_int32),
        ("activation", c_int32),
        ("shared_size", c_int32),
        ("is_mxfp4", c_int32),
    ]


class FaserModel(Structure):
    """struct faser_model."""

    _fields_ = [
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate_size", c_int32),
        ("vocab_size", c_int32),
        ("max_seq_len", c_int32),
        ("rms_norm_eps", c_float),
        ("rope_attention_factor", c_float),
        ("rope_inv_freq", c_void_p),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("lm_head", c_void_p),
        ("layers", POINTER(FaserLayer)),
        ("windows", POINTER(c_int32)),
        ("head", POINTER(FaserHead)),
        ("medusa", POINTER(FaserMedusa)),
        ("block", POINTER(FaserBlock)),
        ("experts", POINTER(FaserExperts)),
        ("lm_head_scales", c_void_p),
        ("weight_bits", c_int32),
        ("group_size", c_int32),
        ("activation_bits", c_int32),
        ("num_outputs", c_int32),
        ("output_ids", c_void_p),
    ]


class FaserBatch(Structure):
    """struct faser_batch."""

    _fields_ = [
        ("num_requests", c_int32),
        ("num_rows", c_int32),
        ("max_blocks_per_seq", c_int32),
        ("slots", c_void_p),
        ("cu_rows", c_void_p),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("block_table", c_void_p),
        ("branch_parents", c_void_p),
        ("num_branches", c_int32),
    ]


class FaserSampling(Structure):
    """struct faser_sampling: one request's sampling parameters."""

    _fields_ = [
        ("tokens", c_void_p),
        ("draft_probs", c_void_p),
        ("draft_margins", c_void_p),
        ("draft_candidates", c_void_p),
        ("draft_sources", c_void_p),
        ("end_ids", c_void_p),
        ("bias_ids", c_void_p),
        ("bias_values", c_void_p),
        ("bad_words", c_void_p),
        ("cu_bad_words", c_void_p),
        ("key", c_uint64),
        ("draft_counter", c_uint64),
        ("num_tested", c_int64 * NUM_SOURCES),
        ("num_passed", c_int64 * NUM_SOURCES),
        ("num_end_ids", c_int32),
        ("num_bias", c_int32),
        ("num_bad_words", c_int32),
        ("prompt_len", c_int32),
        ("min_tokens", c_int32),
        ("mode", c_int32),
        ("top_k", c_int32),
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("num_mask_rows", c_int32),
        ("masks", c_void_p),
        ("fill_masks", c_void_p),
        ("draft_runners_up", c_void_p),
    ]


FillMasks = ctypes.CFUNCTYPE(None, c_int32, POINTER(c_int32), POINTER(c_int32))
"""faser_fill_masks: num_requests, slots, num_known."""


class FaserDraftStop(Structure):
    """struct faser_draft_stop: when drafting ends early."""

    _fields_ = [
        ("slope", c_void_p),
        ("intercept", c_void_p),
        ("prior", c_void_p),
        ("spread", c_void_p),
        ("row_price", c_void_p),
        ("step_price", c_void_p),
        ("stride", c_int32),
    ]


class FaserSlotCosts(Structure):
    """struct faser_slot_costs: costs of a pass's slots."""

    _fields_ = [
        ("verify_ms", c_void_p),
        ("draft_first_ms", c_void_p),
        ("draft_step_ms", c_void_p),
        ("fixed_ms", c_double),
        ("base_tokens", c_double),
        ("price", c_double),
        ("num_costs", c_int32),
        ("multiple", c_int32),
    ]


class FaserAcceptance(Structure):
    """struct faser_acceptance: acceptance probabilities of drafts."""

    _fields_ = [
        ("slope", c_void_p),
        ("intercept", c_void_p),
        ("max_margin", c_double),
        ("stride", c_int32),
    ]


class FaserTestSums(Structure):
    """struct faser_test_sums: sums over verified drafts."""

    _fields_ = [("cells", c_void_p), ("bins", c_void_p), ("num_bins", c_int32)]


class FaserTexts(Structure):
    """struct faser_texts: addresses of a slot's tokens, end ids and draft sources."""

    _fields_ = [("tokens", c_void_p), ("end_ids", c_void_p), ("num_end_ids", c_int64), ("draft_sources", c_void_p)]


class FaserPassLimits(Structure):
    """struct faser_pass_limits: limits of an engine with its own memory."""

    _fields_ = [
        ("vocab_size", c_int32),
        ("max_seq_len", c_int32),
        ("tokens_per_block", c_int32),
        ("num_blocks", c_int32),
        ("max_num_requests", c_int32),
        ("max_num_rows", c_int32),
        ("max_num_branches", c_int32),
        ("max_blocks_per_seq", c_int32),
    ]
