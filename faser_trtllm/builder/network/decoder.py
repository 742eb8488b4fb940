"""Add a decoder's layers to a network, the same for all model families, dtypes and attention flavours."""

from __future__ import annotations

from typing import Any

from faser_trtllm.builder.network.attention import Attention, split_heads
from faser_trtllm.builder.network.graph import Graph
from faser_trtllm.models.config import ModelConfig


def add_embedding(graph: Graph, config: ModelConfig, token_ids: Any) -> Any:
    """Look up token_ids i32 [rows]; return hidden rows [rows, hidden_size]."""
    table = graph.matrix("model.embed_tokens", num_in=config.hidden_size, num_out=(config.vocab_size,))
    return graph.gather(table, token_ids)


def add_layer(graph: Graph, config: ModelConfig, attention: Attention, layer_index: int, x: Any) -> Any:
    """Run hidden rows x [rows, hidden_size] through one layer; return the hidden rows after it."""
    prefix, hidden, eps = f"model.layers.{layer_index}", config.hidden_size, config.rms_norm_eps
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    normed = graph.rms_norm(x, f"{prefix}.input_layernorm", hidden, eps)
    qkv = graph.linear(
        normed,
        *(f"{prefix}.self_attn.{part}_proj" for part in "qkv"),
        num_in=hidden,
        num_out=(q_size, kv_size, kv_size),
        bias=config.qkv_bias,
    )
    qkv = graph.reshape(qkv, -1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
    if config.qk_norm:
        q, k, v = split_heads(graph, config, qkv)
        q = graph.rms_norm(q, f"{prefix}.self_attn.q_norm", config.head_dim, eps)
        k = graph.rms_norm(k, f"{prefix}.self_attn.k_norm", config.head_dim, eps)
        qkv = graph.concatenate([q, k, v], 1)
    y = attention.add(layer_index, qkv)
    y = graph.linear(y, f"{prefix}.self_attn.o_proj", num_in=q_size, num_out=(hidden,), bias=config.o_bias)
    x = graph.elementwise(x, y, "SUM")
    return graph.elementwise(x, _add_mlp(graph, config, prefix, x), "SUM")


def add_head(graph: Graph, config: ModelConfig, x: Any) -> Any:
    """Return logits [rows, vocab_size] of hidden rows x [rows, hidden_size]."""
    x = graph.rms_norm(x, "model.norm", config.hidden_size, config.rms_norm_eps)
    return graph.linear(x, head_name(config), num_in=config.hidden_size, num_out=(config.vocab_size,))


def head_name(config: ModelConfig) -> str:
    """Return the checkpoint's name for the LM head, which may be the embedding."""
    return "model.embed_tokens" if config.tie_word_embeddings else "lm_head"


def _add_mlp(graph: Graph, config: ModelConfig, prefix: str, x: Any) -> Any:
    hidden, inner, trt = config.hidden_size, config.intermediate_size, graph.trt
    x = graph.rms_norm(x, f"{prefix}.post_attention_layernorm", hidden, config.rms_norm_eps)
    gate_up = graph.linear(
        x,
        f"{prefix}.mlp.gate_proj",
        f"{prefix}.mlp.up_proj",
        num_in=hidden,
        num_out=(inner, inner),
        bias=config.mlp_bias,
    )
    gate_up = graph.cast(gate_up, trt.float32)
    gate, up = graph.slice(gate_up, 1, 0, inner), graph.slice(gate_up, 1, inner, inner)
    sigmoid = graph.network.add_activation(gate, trt.ActivationType.SIGMOID).get_output(0)
    product = graph.elementwise(graph.elementwise(gate, sigmoid, "PROD"), up, "PROD")
    product = graph.cast(product, graph.dtype)
    return graph.linear(product, f"{prefix}.mlp.down_proj", num_in=inner, num_out=(hidden,), bias=config.mlp_bias)
