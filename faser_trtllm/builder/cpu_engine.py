"""The CPU backend of `faser build`: a model's sizes and its weights, fused, padded and packed into an engine file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.builder import engine_file
from faser_trtllm.builder.backend import Progress
from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.builder.engine_file import PANEL, TensorSource, pack_matrix, round_up
from faser_trtllm.builder.options import BuildOptions
from faser_trtllm.builder.source import Eagle3Head, Source
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.rope import rope_frequencies
from faser_trtllm.models.weights import Weights

DEFAULT_TOKENS_PER_BLOCK = 32


class CpuBackend:
    """EngineBuilder (builder/backend.py) that writes CPU engine files tensor by tensor."""

    def tokens_per_block(self, wanted: int | None, max_seq_len: int) -> int:
        size = DEFAULT_TOKENS_PER_BLOCK if wanted is None else wanted
        if size < 16 or size % 16:
            raise InvalidArgumentError(f"tokens_per_block is {size}, it must be a multiple of 16")
        return size

    def identity(self, sources: Sequence[Source], build_config: BuildConfig) -> dict[str, Any]:
        heads = {source.role: _head_json(source) for source in sources if source.head is not None}
        return {"engine_file_version": engine_file.VERSION} | ({"eagle3": heads} if heads else {})

    def engine_config(self, source: Source, build_config: BuildConfig) -> dict[str, Any]:
        return {} if source.head is None else {"eagle3": _head_json(source)}

    def min_bytes(self, source: Source, build_config: BuildConfig) -> int:
        sizes = engine_file.tensor_sizes(_model(source, build_config))
        return sum(nbytes for nbytes, required in sizes.values() if required)

    def write_engine(self, path: Path, source: Source, build_config: BuildConfig, progress: Progress | None) -> None:
        head = source.head
        make = engine_tensors(source.config, source.weights) if head is None else head_tensors(head, source.weights)
        tensors = list(make)
        done = 0

        def on_tensor(name: str) -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(source.role, done, len(tensors))

        model = _model(source, build_config)
        engine_file.write_engine_file(path, model, list(source.segments), tensors, on_tensor)


def open_builder(options: BuildOptions) -> CpuBackend:
    """The cpu backend's builder."""
    return CpuBackend()


def _model(source: Source, build_config: BuildConfig) -> dict[str, Any]:
    model = engine_model(source.config, build_config.max_seq_len)
    return model if source.head is None else model | {"head": _head_json(source)}


def _head_json(source: Source) -> dict[str, Any]:
    """The `head` object of an engine file's header."""
    assert source.head is not None
    config = source.head.config
    return {
        "layers": list(config.layers),
        "num_features": config.num_features,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": int(config.norm_before_residual),
    }


def engine_model(config: ModelConfig, max_seq_len: int) -> dict[str, Any]:
    """The `model` object of an engine file's header."""
    _, rope_attention_factor = rope_frequencies(config.rope, config.head_dim)
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_seq_len": max_seq_len,
        "sliding_window": config.sliding_window,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_attention_factor": rope_attention_factor,
        "tied": config.tie_word_embeddings,
    }


def engine_tensors(config: ModelConfig, weights: Weights) -> Iterator[tuple[str, TensorSource]]:
    """Every tensor of the engine file, each made on demand."""
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = "model.embed_tokens.weight"
    yield "rope_inv_freq", rope_frequencies(config.rope, config.head_dim)[0]
    if not config.tie_word_embeddings:
        yield "embedding", lambda: weights.bfloat16(embedding, (vocab, hidden))
    for i in range(config.num_layers):
        for name, source in _Layer(config, weights, i).tensors():
            yield f"layers.{i}.{name}", source
    yield "final_norm", lambda: weights.float32("model.norm.weight", (hidden,))
    head = embedding if config.tie_word_embeddings else "lm_head.weight"
    yield "lm_head", lambda: pack_matrix(weights.bfloat16(head, (vocab, hidden)))


def head_tensors(head: Eagle3Head, weights: Weights) -> Iterator[tuple[str, TensorSource]]:
    """engine_tensors of an EAGLE-3 head."""
    config, model = head.config, head.config.model
    hidden, vocab = model.hidden_size, model.vocab_size
    yield "rope_inv_freq", rope_frequencies(model.rope, model.head_dim)[0]
    yield "embedding", lambda: weights.bfloat16("model.embed_tokens.weight", (vocab, hidden))
    for name, source in _Layer(model, weights, 0, num_inputs=2 * hidden).tensors():
        yield f"layers.0.{name}", source
    yield "final_norm", lambda: weights.float32("model.norm.weight", (hidden,))
    yield "lm_head", lambda: pack_matrix(weights.bfloat16("lm_head.weight", (config.draft_vocab_size, hidden)))
    yield "head.fc", lambda: pack_matrix(weights.bfloat16("fc.weight", (hidden, config.num_features)))
    if config.fc_bias:
        yield "head.fc_bias", lambda: weights.float32("fc.bias", (hidden,))
    yield "head.hidden_norm", lambda: weights.float32("model.layers.0.hidden_norm.weight", (hidden,))
    if head.target_ids is not None:
        yield "head.target_ids", head.target_ids


class _Layer:
    def __init__(self, config: ModelConfig, weights: Weights, index: int, num_inputs: int | None = None) -> None:
        """num_inputs: of q, k and v, where it is not hidden_size."""
        self._config = config
        self._weights = weights
        self._num_inputs = config.hidden_size if num_inputs is None else num_inputs
        self._prefix = f"model.layers.{index}"
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        self._gate_up = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), config.intermediate_size)

    def tensors(self) -> Iterator[tuple[str, TensorSource]]:
        config = self._config
        hidden, inner, q_size = config.hidden_size, config.intermediate_size, self._qkv["self_attn.q_proj"]
        yield "input_norm", lambda: self._vector("input_layernorm.weight", hidden)
        yield "qkv", lambda: pack_matrix(self._rows(self._qkv, 1, self._num_inputs))
        if config.qkv_bias:
            yield "qkv_bias", lambda: self._biases(self._qkv, 1)
        if config.qk_norm:
            yield "q_norm", lambda: self._vector("self_attn.q_norm.weight", config.head_dim)
            yield "k_norm", lambda: self._vector("self_attn.k_norm.weight", config.head_dim)
        yield "o", lambda: pack_matrix(self._matrix("self_attn.o_proj", hidden, q_size))
        if config.o_bias:
            yield "o_bias", lambda: self._vector("self_attn.o_proj.bias", hidden)
        yield "post_norm", lambda: self._vector("post_attention_layernorm.weight", hidden)
        yield "gate_up", lambda: pack_matrix(self._rows(self._gate_up, PANEL, hidden))
        if config.mlp_bias:
            yield "gate_up_bias", lambda: self._biases(self._gate_up, PANEL)
        yield "down", lambda: pack_matrix(self._matrix("mlp.down_proj", hidden, inner))
        if config.mlp_bias:
            yield "down_bias", lambda: self._vector("mlp.down_proj.bias", hidden)

    def _vector(self, name: str, size: int) -> npt.NDArray[np.float32]:
        return self._weights.float32(f"{self._prefix}.{name}", (size,))

    def _matrix(self, name: str, num_out: int, num_in: int) -> npt.NDArray[np.uint16]:
        return self._weights.bfloat16(f"{self._prefix}.{name}.weight", (num_out, num_in))

    def _rows(self, parts: dict[str, int], multiple: int, num_inputs: int) -> npt.NDArray[np.uint16]:
        """The parts stacked along rows, each zero-padded to a multiple."""
        sizes = [round_up(size, multiple) for size in parts.values()]
        fused = np.zeros((sum(sizes), num_inputs), np.uint16)
        start = 0
        for (name, size), padded in zip(parts.items(), sizes, strict=True):
            fused[start : start + size] = self._matrix(name, size, num_inputs)
            start += padded
        return fused

    def _biases(self, parts: dict[str, int], multiple: int) -> npt.NDArray[np.float32]:
        padded = []
        for name, size in parts.items():
            padded.append(np.zeros(round_up(size, multiple), np.float32))
            padded[-1][:size] = self._vector(f"{name}.bias", size)
        return np.concatenate(padded)
