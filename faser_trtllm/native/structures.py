"""The structures of faser_cpu.h, field for field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

NUM_SOURCES = 2


def _layout(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Return _fields_ from groups of consecutive fields: their type, and their names separated by spaces."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class FaserLayer(Structure):
    """struct faser_layer: addresses of one layer's weights, None where the header allows NULL."""

    _fields_ = _layout(
        (c_void_p, "input_norm qkv qkv_bias q_norm k_norm o o_bias post_norm gate_up gate_up_bias down"),
        (c_void_p, "down_bias qkv_scales o_scales gate_up_scales down_scales router router_bias"),
        (c_void_p, "shared_gate_up shared_down shared_gate shared_gate_up_scales shared_down_scales sinks"),
    )


class FaserHead(Structure):
    """struct faser_head: the parts of an EAGLE-3 head or an MTP layer that a decoder lacks."""

    _fields_ = _layout(
        (c_void_p, "fc fc_bias hidden_norm target_ids"),
        (c_int32, "num_features draft_vocab_size norm_before_residual"),
        (c_void_p, "input_proj token_norm"),
        (c_int32, "reads_normed feeds_normed num_fc_norms"),
        (c_void_p, "fc_norm"),
    )


class FaserMedusa(Structure):
    """struct faser_medusa: Medusa heads, which replace a decoder's layers."""

    _fields_ = _layout(
        (c_void_p, "residual residual_bias"),
        (c_int32, "num_heads num_layers"),
    )


class FaserConv(Structure):
    """struct faser_conv: a convolution next to a sublayer of a block drafter."""

    _fields_ = _layout(
        (c_void_p, "base delta"),
    )


class FaserBlock(Structure):
    """struct faser_block: the parts of a block drafter that a decoder lacks."""

    _fields_ = _layout(
        (c_void_p, "fc hidden_norm markov_in markov_out predecessors successors selector_proj"),
        (POINTER(FaserConv), "attention_convs mlp_convs"),
        (POINTER(c_int32), "causal"),
        (c_int32, "num_features block_size first_slot mask_token_id markov_rank selector_rank"),
        (c_int32, "selector_top_k conv_taps conv_group_size"),
        (c_float, "logit_softcap logit_scale embedding_scale"),
    )


class FaserExperts(Structure):
    """struct faser_experts: sizes of a mixture of experts."""

    _fields_ = _layout(
        (c_int32, "num_experts top_k scoring norm_topk activation shared_size is_mxfp4"),
    )


class FaserModel(Structure):
    """struct faser_model."""

    _fields_ = _layout(
        (c_int32, "num_layers hidden_size num_heads num_kv_heads head_dim intermediate_size vocab_size"),
        (c_int32, "max_seq_len"),
        (c_float, "rms_norm_eps rope_attention_factor"),
        (c_void_p, "rope_inv_freq embedding final_norm lm_head"),
        (POINTER(FaserLayer), "layers"),
        (POINTER(c_int32), "windows"),
        (POINTER(FaserHead), "head"),
        (POINTER(FaserMedusa), "medusa"),
        (POINTER(FaserBlock), "block"),
        (POINTER(FaserExperts), "experts"),
        (c_void_p, "lm_head_scales"),
        (c_int32, "weight_bits group_size activation_bits num_outputs"),
        (c_void_p, "output_ids"),
        (c_int32, "norms_all_heads"),
    )


class FaserBatch(Structure):
    """struct faser_batch."""

    _fields_ = _layout(
        (c_int32, "num_requests num_rows max_blocks_per_seq"),
        (c_void_p, "slots cu_rows token_ids positions block_table branch_parents"),
        (c_int32, "num_branches"),
    )


class FaserSampling(Structure):
    """struct faser_sampling: one request's sampling parameters."""

    _fields_ = _layout(
        (c_void_p, "tokens draft_probs draft_margins draft_candidates draft_sources end_ids bias_ids"),
        (c_void_p, "bias_values bad_words cu_bad_words"),
        (c_uint64, "key draft_counter"),
        (c_int64 * NUM_SOURCES, "num_tested num_passed"),
        (c_int32, "num_end_ids num_bias num_bad_words prompt_len min_tokens mode top_k"),
        (c_float, "temperature top_p min_p repetition_penalty presence_penalty frequency_penalty"),
        (c_int32, "num_mask_rows"),
        (c_void_p, "masks fill_masks draft_runners_up"),
    )


FillMasks = ctypes.CFUNCTYPE(None, c_int32, POINTER(c_int32), POINTER(c_int32))
"""The callback faser_fill_masks(num_requests, slots, num_known)."""


class FaserDraftStop(Structure):
    """struct faser_draft_stop: when drafting ends early."""

    _fields_ = _layout(
        (c_void_p, "slope intercept prior spread row_price step_price"),
        (c_int32, "stride"),
    )


class FaserSlotCosts(Structure):
    """struct faser_slot_costs: costs of a pass's slots."""

    _fields_ = _layout(
        (c_void_p, "verify_ms draft_first_ms draft_step_ms"),
        (c_double, "fixed_ms base_tokens price"),
        (c_int32, "num_costs multiple"),
    )


class FaserAcceptance(Structure):
    """struct faser_acceptance: acceptance probabilities of drafts."""

    _fields_ = _layout(
        (c_void_p, "slope intercept"),
        (c_double, "max_margin"),
        (c_int32, "stride"),
    )


class FaserTestSums(Structure):
    """struct faser_test_sums: sums over verified drafts."""

    _fields_ = _layout(
        (c_void_p, "cells bins"),
        (c_int32, "num_bins"),
    )


class FaserTexts(Structure):
    """struct faser_texts: addresses of a slot's tokens, end ids and draft sources."""

    _fields_ = _layout(
        (c_void_p, "tokens end_ids"),
        (c_int64, "num_end_ids"),
        (c_void_p, "draft_sources"),
    )


class FaserPassLimits(Structure):
    """struct faser_pass_limits: limits of an engine with its own memory."""

    _fields_ = _layout(
        (c_int32, "vocab_size max_seq_len tokens_per_block num_blocks max_num_requests max_num_rows"),
        (c_int32, "max_num_branches max_blocks_per_seq"),
    )
