"""Attention in TensorRT networks, with TensorRT's own layers or with our plugins."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from faser_trtllm.builder.network.graph import Graph
from faser_trtllm.errors import ConfigError
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.rope import rope_frequencies
from faser_trtllm.ops.cuda.verify_attention import MAX_WHOLE_TOKENS, SPLIT_TOKENS


class Attention(Protocol):
    """The part of a network that depends on the flavour ("native" or "plugin"); the decoder does not."""

    flavour: str
    plugins: tuple[str, ...]  # ids of the plugins that the network calls

    def add_inputs(self) -> None:
        """Declare the inputs of all layers."""

    def add(self, layer_index: int, qkv: Any) -> Any:
        """Add one layer's attention with its caches, and return its output [rows, num_heads * head_dim].

        qkv [rows, num_heads + 2 * num_kv_heads, head_dim]: before rope, after q/k norm if the model has it.
        """


def choose_attention(graph: Graph, config: ModelConfig) -> Attention:
    """Return plugin attention if the network object supports plugins, else native; ConfigError if neither works."""
    network = graph.network
    if config.has_sinks:
        raise ConfigError(
            f"the attention of a {config.architecture} has sinks, which neither TensorRT's nor our plugins' has; build "
            "with --backend cpu"
        )
    if hasattr(network, "add_plugin"):
        return PluginAttention(graph, config)
    if hasattr(network, "add_attention_v2") and hasattr(network, "add_kv_cache_update"):
        return NativeAttention(graph, config)
    raise ConfigError(
        f"{graph.trt.__name__} {graph.trt.__version__} has neither plugins nor attention layers; "
        "install TensorRT 10.13 or newer, or TensorRT for RTX 1.7 or newer"
    )


class NativeAttention:
    """IAttention and IKVCacheUpdate on linear caches. The batch has an entry per cache row; idle ones have no rows.

    Rows are packed everywhere except in attention itself: pad_idx gathers Q to [batch, heads, query_rows, head_dim] and
    unpad_idx gathers the output back. The mask is computed from positions, so it is exact for any set of rows.
    """

    flavour = "native"
    plugins: tuple[str, ...] = ()

    def __init__(self, graph: Graph, config: ModelConfig) -> None:
        options = graph.options
        if options.tokens_per_block != options.max_seq_len:
            raise ConfigError(
                f"tokens_per_block is {options.tokens_per_block}, TensorRT's own attention has linear caches only; "
                f"set it to max_seq_len ({options.max_seq_len})"
            )
        self._graph = graph
        self._config = config

    def add_inputs(self) -> None:
        graph = self._graph
        positions = graph.add_input("positions", "int32", "rows")
        self._cu_q_lens = graph.add_input("cu_q_lens", "int32", "batch_plus_one")
        self._kv_lens = graph.add_input("kv_lens", "int32", "batch")
        self._write_idx = graph.add_input("write_idx", "int32", "batch")
        self._pad_idx = graph.add_input("pad_idx", "int32", "batch", "query_rows")
        self._unpad_idx = graph.add_input("unpad_idx", "int32", "rows")
        self._position_ids = graph.reshape(graph.cast(positions, graph.trt.int64), -1, 1)
        self._positions = positions
        self._masks: dict[int, Any] = {}  # by window
        self._rope_tables = _rope_tables(graph, self._config)

    def add(self, layer_index: int, qkv: Any) -> Any:
        graph, config, trt = self._graph, self._config, self._graph.trt
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q, k, v = split_heads(graph, config, qkv)
        # IAttention does not scale the scores.
        scale = graph.literal("softmax_scale", np.full((1, 1, 1, 1), head_dim**-0.5, np.float32))
        q = graph.elementwise(self._rotate(q), scale, "PROD")
        q = graph.reshape(graph.cast(q, graph.dtype), -1, num_heads, head_dim)
        k = graph.reshape(graph.cast(self._rotate(k), graph.dtype), -1, num_kv_heads, head_dim)
        k_cache, v_cache = self._update("k", layer_index, k), self._update("v", layer_index, v)
        # Padding slots repeat a row; their results are never read.
        q = graph.transpose(graph.gather(q, self._pad_idx), 0, 2, 1, 3)
        mask = self._mask(config.windows[layer_index])
        normalization, causal = trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.NONE
        layer = graph.network.add_attention_v2(q, k_cache, v_cache, normalization, causal)
        layer.mask = mask
        layer.key_value_form = trt.AttentionIOForm.PADDED_BHND
        layer.key_value_lengths = self._kv_lens
        # TensorRT has no fused kernel for fp32.
        layer.decomposable = graph.options.dtype == "float32"
        layer.name = f"layers.{layer_index}.attention"
        y = graph.transpose(layer.get_output(0), 0, 2, 1, 3, then_reshape=(-1, num_heads * head_dim))
        return graph.gather(y, self._unpad_idx)

    def _rotate(self, x: Any) -> Any:
        """Rotate x [rows, heads, head_dim] to fp32 [rows, heads, 1, head_dim], each row as its own sequence."""
        graph, head_dim = self._graph, self._config.head_dim
        x = graph.reshape(graph.cast(x, graph.trt.float32), 0, 0, 1, head_dim)
        layer = graph.network.add_rotary_embedding(x, *self._rope_tables, False, head_dim)
        layer.set_input(3, self._position_ids)
        return layer.get_output(0)

    def _update(self, part: str, layer_index: int, update: Any) -> Any:
        graph, trt = self._graph, self._graph.trt
        shape = ("batch", self._config.num_kv_heads, graph.options.max_seq_len, self._config.head_dim)
        dtype = graph.options.dtype
        cache = graph.add_input(f"{part}_cache_{layer_index}", dtype, *shape)
        layer = graph.network.add_kv_cache_update(cache, update, self._write_idx, trt.KVCacheMode.LINEAR)
        layer.update_form = trt.AttentionIOForm.PACKED_NHD
        layer.update_lengths = self._cu_q_lens
        layer.name = f"layers.{layer_index}.{part}_cache_update"
        updated = layer.get_output(0)
        graph.mark_output(updated, f"{part}_cache_out_{layer_index}", dtype, *shape)
        return updated

    def _mask(self, window: int) -> Any:
        if window not in self._masks:
            self._masks[window] = self._add_mask(window)
        return self._masks[window]

    def _add_mask(self, window: int) -> Any:
        """Return a mask, bool [batch, 1, query_rows, max_seq_len], true where a query attends to a key."""
        graph = self._graph
        keys = np.arange(graph.options.max_seq_len, dtype=np.int32).reshape(1, 1, 1, -1)
        key = graph.literal("key_positions", keys)
        query = graph.reshape(graph.gather(self._positions, self._pad_idx), 0, 1, -1, 1)
        hidden = graph.elementwise(key, query, "GREATER")
        if 0 < window < graph.options.max_seq_len:
            first = graph.literal(f"key_positions_behind_window_{window}", keys + window)
            seen = graph.elementwise(first, query, "GREATER")
            return graph.elementwise(graph.unary(hidden, "NOT"), seen, "AND")
        return graph.unary(hidden, "NOT")


class PluginAttention:
    """Our plugins on paged caches [blocks, num_kv_heads, tokens_per_block, head_dim], without padding.

    faser::append_kv(qkv [rows, (num_heads + 2 * num_kv_heads) * head_dim], cos, sin fp32 [max_seq_len, head_dim / 2],
    positions, cu_q_lens, block_table, kv_lens, k_cache, v_cache) -> q [rows, num_heads, head_dim], k_cache, v_cache;
    faser::verify_attention(q, k_cache, v_cache, block_table, cu_q_lens, kv_lens, split_tokens) -> [rows, num_heads,
    head_dim], scaled by head_dim ** -0.5, and a workspace fp32; where contexts can be longer than a chunk,
    faser::verify_attention_combine(both, cu_q_lens, kv_lens, num_kv_heads, tokens_per_block, max_blocks_per_seq,
    split_tokens) -> [rows, num_heads, head_dim]. kv_lens includes the new rows. Each cache output is bound to its
    input's address.
    """

    flavour = "plugin"

    def __init__(self, graph: Graph, config: ModelConfig) -> None:
        options = graph.options
        window = min(filter(None, config.windows), default=0)
        if 0 < window < options.max_seq_len:
            raise ConfigError(
                f"sliding_window is {window}, which faser::verify_attention does not have; lower "
                f"max_seq_len ({options.max_seq_len}) to it, or build with --backend cpu or tensorrt_rtx"
            )
        self._is_split = options.max_blocks_per_seq * options.tokens_per_block > MAX_WHOLE_TOKENS
        self.plugins: tuple[str, ...] = ("faser::append_kv", "faser::verify_attention")
        if self._is_split:
            self.plugins += ("faser::verify_attention_combine",)
        try:
            self._ops = graph.trt.plugin.op.faser
        except AttributeError as error:
            raise ConfigError(
                f"the plugins {' and '.join(self.plugins)} are not registered with {graph.trt.__name__} "
                f"{graph.trt.__version__}; call faser_trtllm.builder.plugins.register(trt) first, with TensorRT 10.13 "
                "or newer"
            ) from error
        self._graph = graph
        self._config = config

    def add_inputs(self) -> None:
        graph = self._graph
        self._positions = graph.add_input("positions", "int32", "rows")
        self._cu_q_lens = graph.add_input("cu_q_lens", "int32", "batch_plus_one")
        self._kv_lens = graph.add_input("kv_lens", "int32", "batch")
        self._block_table = graph.add_input("block_table", "int32", "batch", graph.options.max_blocks_per_seq)
        self._rope_tables = _rope_tables(graph, self._config)

    def add(self, layer_index: int, qkv: Any) -> Any:
        graph, config, dtype = self._graph, self._config, self._graph.options.dtype
        shape = ("blocks", config.num_kv_heads, graph.options.tokens_per_block, config.head_dim)
        caches = [graph.add_input(f"{part}_cache_{layer_index}", dtype, *shape) for part in "kv"]
        num_heads = config.num_heads + 2 * config.num_kv_heads
        flat = graph.reshape(qkv, -1, num_heads * config.head_dim)
        cu_q_lens, block_table, kv_lens = self._cu_q_lens, self._block_table, self._kv_lens
        call = self._ops.append_kv(flat, *self._rope_tables, self._positions, cu_q_lens, block_table, kv_lens, *caches)
        layer = graph.network.add_plugin(call, aot=True)
        layer.name = f"layers.{layer_index}.append_kv"
        q, *updated = (layer.get_output(i) for i in range(3))
        for part, cache in zip("kv", updated, strict=True):
            graph.mark_output(cache, f"{part}_cache_out_{layer_index}", dtype, *shape)
        split_tokens = SPLIT_TOKENS if self._is_split else 0
        call = self._ops.verify_attention(q, *updated, block_table, cu_q_lens, kv_lens, split_tokens)
        layer = graph.network.add_plugin(call, aot=True)
        layer.name = f"layers.{layer_index}.verify_attention"
        attended = layer.get_output(0)
        if self._is_split:
            sizes = config.num_kv_heads, graph.options.tokens_per_block, graph.options.max_blocks_per_seq, split_tokens
            call = self._ops.verify_attention_combine(attended, layer.get_output(1), cu_q_lens, kv_lens, *sizes)
            layer = graph.network.add_plugin(call, aot=True)
            layer.name = f"layers.{layer_index}.verify_attention_combine"
            attended = layer.get_output(0)
        return graph.reshape(attended, -1, config.num_heads * config.head_dim)


def split_heads(graph: Graph, config: ModelConfig, qkv: Any) -> tuple[Any, Any, Any]:
    """Split qkv [rows, num_heads + 2 * num_kv_heads, head_dim] into q, k, v [rows, heads, head_dim]."""
    q, k = config.num_heads, config.num_kv_heads
    return graph.slice(qkv, 1, 0, q), graph.slice(qkv, 1, q, k), graph.slice(qkv, 1, q + k, k)


def _rope_tables(graph: Graph, config: ModelConfig) -> tuple[Any, Any]:
    """Return cos and sin of every position, fp32 [max_seq_len, head_dim / 2], times the rope's factor."""
    inv_freq, factor = rope_frequencies(config.rope, config.head_dim)
    angles = np.outer(np.arange(graph.options.max_seq_len, dtype=np.float32), inv_freq)
    scale = np.float32(factor)
    return graph.literal("rope_cos", np.cos(angles) * scale), graph.literal("rope_sin", np.sin(angles) * scale)
