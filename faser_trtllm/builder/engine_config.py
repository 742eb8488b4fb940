"""Make an engine's config.json: TensorRT-LLM's layout (tensorrt_llm/builder.py), with our entries under "faser"."""

from __future__ import annotations

import dataclasses
from typing import Any

from faser_trtllm import __version__
from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.builder.options import BuildOptions
from faser_trtllm.builder.source import Source


def engine_config(
    source: Source, build_config: BuildConfig, options: BuildOptions, extra: dict[str, Any]
) -> dict[str, Any]:
    """Return an engine's config.json. extra: the backend's own entries under "faser"."""
    config, is_target = source.config, source.role == "target"
    tp_size = options.tp_size if is_target else 1
    return {
        "version": __version__,
        "pretrained_config": {
            "architecture": config.architecture,
            "dtype": options.dtype,
            "logits_dtype": "float32",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_size": config.head_dim,
            "hidden_act": "silu",
            "norm_epsilon": config.rms_norm_eps,
            "position_embedding_type": "rope_gpt_neox",
            "max_position_embeddings": config.max_position_embeddings,
            "rotary_base": config.rope.theta,
            "rotary_scaling": dataclasses.asdict(config.rope),
            "qk_layernorm": config.qk_norm,
            "attn_bias": config.qkv_bias,
            "mlp_bias": config.mlp_bias,
            "share_embedding_table": config.tie_word_embeddings,
            "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1},
        },
        "build_config": {
            "max_batch_size": build_config.max_batch_size,
            "max_num_tokens": build_config.max_num_tokens,
            "max_seq_len": build_config.max_seq_len,
            "max_input_len": build_config.max_seq_len - 1,
            "max_beam_width": 1,
            "max_draft_len": build_config.max_draft_len,
            "kv_cache_type": "PAGED" if build_config.tokens_per_block < build_config.max_seq_len else "CONTINUOUS",
            "plugin_config": {"tokens_per_block": build_config.tokens_per_block},
        },
        "faser": {
            "role": source.role,
            "backend": options.backend,
            "segments": list(source.segments),
            "expand": options.expand if is_target else 1,
            "windows": list(config.windows),
        }
        | extra,
    }
