"""Describe a model to the native library: the sizes of an engine file and the addresses of its mapped tensors."""

from __future__ import annotations

import ctypes
from typing import Any

from faser_trtllm.builder.engine_file import EngineFile
from faser_trtllm.errors import EngineFileError
from faser_trtllm.models.config import layer_windows
from faser_trtllm.models.experts import CLAMPED, SILU, SOFTMAX, TOP_K_SOFTMAX
from faser_trtllm.models.quantized_weight import Scheme, scheme_of
from faser_trtllm.native.structures import (
    FaserBlock,
    FaserConv,
    FaserExperts,
    FaserHead,
    FaserLayer,
    FaserMedusa,
    FaserModel,
)

_MODEL_SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "rope_attention_factor",
)
_LAYER_TENSORS = tuple(field[0] for field in FaserLayer._fields_)
_OPTIONAL_LAYER_TENSORS = frozenset(
    {"qkv_bias", "q_norm", "k_norm", "o_bias", "sinks", "gate_up_bias", "down_bias"}
    | {name for name in _LAYER_TENSORS if name.endswith("_scales") or name.startswith(("router", "shared_"))},
)
_EXPERTS_TENSORS = frozenset(f"{name}{suffix}" for name in ("gate_up", "down") for suffix in ("", "_bias", "_scales"))
"""Layer tensors that a mixture has per expert; the file names them expert_gate_up and so on."""
_BF16 = Scheme(16, 0)
_SCORINGS = (SOFTMAX, TOP_K_SOFTMAX)  # indexed by faser_scoring
_ACTIVATIONS = (SILU, CLAMPED)  # indexed by faser_activation

_HEAD_TENSORS = ("fc", "fc_bias", "fc_norm", "hidden_norm", "target_ids", "input_proj", "token_norm")
_BLOCK_TENSORS = ("fc", "hidden_norm", "markov_in", "markov_out", "predecessors", "successors", "selector_proj")
_BLOCK_SIZES = ("num_features", "block_size", "first_slot", "mask_token_id", "markov_rank", "selector_rank")
_CHAIN_SIZES = ("selector_top_k", "conv_taps", "conv_group_size")
_BLOCK_FACTORS = ("logit_softcap", "logit_scale", "embedding_scale")
_HEAD_SIZES = (
    *("num_features", "draft_vocab_size", "norm_before_residual", "reads_normed", "feeds_normed", "num_fc_norms"),
)


def native_model(file: EngineFile, max_seq_len: int) -> FaserModel:
    """Return a faser_model whose pointers are into the mapped file; raise EngineFileError if a tensor is missing."""
    sizes: dict[str, Any] = file.header["model"]
    layers = (FaserLayer * sizes["num_layers"])()
    for index, layer in enumerate([] if "medusa" in sizes else layers):
        for name in _LAYER_TENSORS:
            prefix = "expert_" if "experts" in sizes and name in _EXPERTS_TENSORS else ""
            address = file.address(f"layers.{index}.{prefix}{name}")
            if address is None and name not in _OPTIONAL_LAYER_TENSORS:
                raise EngineFileError(
                    f"{file.path.name} lacks the tensor layers.{index}.{prefix}{name}, rebuild it with faser build"
                )
            setattr(layer, name, address)
    model = FaserModel(**{name: sizes[name] for name in _MODEL_SIZES})
    model.max_seq_len = max_seq_len
    scheme = scheme_of(sizes) or _BF16
    is_mxfp4 = scheme.is_mxfp4
    scheme = _BF16 if is_mxfp4 else scheme
    model.weight_bits, model.group_size, model.activation_bits = scheme.bits, scheme.group_size, scheme.activation_bits
    model.num_outputs = sizes.get("num_outputs", 0)
    model.norms_all_heads = sizes.get("norms_all_heads", False)
    for name in ("rope_inv_freq", "final_norm", "lm_head", "lm_head_scales", "output_ids"):
        setattr(model, name, file.address(name))
    model.embedding = None if sizes["tied"] else file.address("embedding")
    model.layers = layers
    if "experts" in sizes:
        model.experts = ctypes.pointer(_experts(sizes["experts"], is_mxfp4))
    windows = sizes["block"]["windows"] if "block" in sizes else layer_windows(sizes)
    model.windows = (ctypes.c_int32 * len(layers))(*windows)
    if "head" in sizes:
        head = FaserHead(
            **{name: file.address(f"head.{name}") for name in _HEAD_TENSORS},
            **{name: sizes["head"].get(name, 0) for name in _HEAD_SIZES},
        )
        model.head = ctypes.pointer(head)
    if "medusa" in sizes:
        medusa = FaserMedusa(
            **{name: file.address(f"medusa.{name}") for name in ("residual", "residual_bias")},
            **{name: sizes["medusa"][name] for name in ("num_heads", "num_layers")},
        )
        model.medusa = ctypes.pointer(medusa)
    if "block" in sizes:
        block_sizes = sizes["block"]
        convs = {}
        for part in ("attention_conv", "mlp_conv") if block_sizes["conv_taps"] else ():
            found = [
                FaserConv(*(file.address(f"layers.{i}.{part}_{name}") for name in ("base", "delta")))
                for i in range(len(layers))
            ]
            convs[f"{part}s"] = (FaserConv * len(layers))(*found)
        block = FaserBlock(
            **{name: file.address(f"block.{name}") for name in _BLOCK_TENSORS},
            **{name: block_sizes[name] for name in _BLOCK_SIZES + _CHAIN_SIZES + _BLOCK_FACTORS},
            causal=(ctypes.c_int32 * len(layers))(*block_sizes["causal"]),
            **convs,
        )
        model.block = ctypes.pointer(block)
    return model


def _experts(experts: dict[str, Any], is_mxfp4: bool) -> FaserExperts:
    return FaserExperts(
        **{name: experts[name] for name in ("num_experts", "top_k", "norm_topk", "shared_size")},
        scoring=_SCORINGS.index(experts["scoring"]),
        activation=_ACTIVATIONS.index(experts["activation"]),
        is_mxfp4=is_mxfp4,
    )
