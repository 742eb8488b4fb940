"""The CPU backend of `faser build`: a model's sizes and its weights, fused, padded and packed into an engine file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.builder import engine_file
from faser_trtllm.builder.backend import Progress
from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.builder.engine_file import PANEL, TensorSource, pack_matrix, pack_quantized, round_up
from faser_trtllm.builder.options import BuildOptions, schemes_of
from faser_trtllm.builder.source import Eagle3Head, Head, MedusaHeads, MtpLayer, Source
from faser_trtllm.errors import CheckpointError, InvalidArgumentError
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.quantized_weight import QuantizedWeight, Scheme, quantize
from faser_trtllm.models.rope import rope_frequencies
from faser_trtllm.models.weights import Weights, float32_from_bfloat16

DEFAULT_TOKENS_PER_BLOCK = 32
_QUANTIZED_ROWS = 4096  # quantised at once, which bounds the memory that large matrices take


class CpuBackend:
    """EngineBuilder (builder/backend.py) that writes CPU engine files tensor by tensor.

    schemes: how a role's weights are quantised; roles that are missing keep bf16.
    """

    def __init__(self, schemes: dict[str, Scheme] | None = None) -> None:
        self._schemes = schemes or {}

    def tokens_per_block(self, wanted: int | None, max_seq_len: int) -> int:
        size = DEFAULT_TOKENS_PER_BLOCK if wanted is None else wanted
        if size < 16 or size % 16:
            raise InvalidArgumentError(f"tokens_per_block is {size}, it must be a multiple of 16")
        return size

    def identity(self, sources: Sequence[Source], build_config: BuildConfig) -> dict[str, Any]:
        entries: dict[str, Any] = {"engine_file_version": engine_file.VERSION}
        for source in sources:
            if source.head is not None:
                entries[source.head.kind] = {source.role: head_json(source.head)}
        quantized = {source.role: self._quantization(source) for source in sources if source.role in self._schemes}
        return entries | ({"quantization": quantized} if quantized else {})

    def engine_config(self, source: Source, build_config: BuildConfig) -> dict[str, Any]:
        quantized = {"quantization": self._quantization(source)} if source.role in self._schemes else {}
        return quantized if source.head is None else {source.head.kind: head_json(source.head)}

    def min_bytes(self, source: Source, build_config: BuildConfig) -> int:
        sizes = engine_file.tensor_sizes(_model(source, build_config), self._schemes.get(source.role))
        return sum(nbytes for nbytes, required in sizes.values() if required)

    def write_engine(self, path: Path, source: Source, build_config: BuildConfig, progress: Progress | None) -> None:
        head, scheme = source.head, self._schemes.get(source.role)
        if head is None:
            tensors = list(engine_tensors(source.config, source.weights, scheme))
        elif isinstance(head, MedusaHeads):
            tensors = list(medusa_tensors(head))
        elif isinstance(head, MtpLayer):
            tensors = list(mtp_tensors(head))
        else:
            tensors = list(head_tensors(head, source.weights))
        done = 0

        def on_tensor(name: str) -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(source.role, done, len(tensors))

        model = _model(source, build_config)
        engine_file.write_engine_file(path, model, list(source.segments), tensors, on_tensor, scheme)

    def _quantization(self, source: Source) -> dict[str, Any]:
        """As TensorRT-LLM's QuantConfig has it; InvalidArgumentError for a model that cannot be quantised so."""
        scheme, config = self._schemes[source.role], source.config
        if source.head is not None:
            raise InvalidArgumentError(
                f"{source.role}_quantization is {scheme}, but the {source.role} is {source.head}, which stays in bf16; "
                "leave it out"
            )
        inputs = {
            "hidden_size": config.hidden_size,
            "num_attention_heads * head_dim": config.num_heads * config.head_dim,
            "intermediate_size": config.intermediate_size,
        }
        for name, num_in in inputs.items():
            if scheme.group_size and num_in % scheme.group_size:
                whole, small = ("W8A8", "W4A8:32") if scheme.activation_bits == 8 else ("int8", "int4:32")
                fix = f"{small} or {whole}" if scheme.group_size > 32 and num_in % 32 == 0 else whole
                raise InvalidArgumentError(
                    f"quantization of the {source.role} is {scheme}, but its {name} is {num_in}, no multiple of "
                    f"{scheme.group_size}; use {fix}"
                )
        return {
            "quant_algo": scheme.algorithm,
            "group_size": scheme.group_size or None,
            "has_zero_point": False,
            "exclude_modules": [] if scheme.lm_head else ["lm_head"],
        }


def open_builder(options: BuildOptions) -> CpuBackend:
    """The cpu backend's builder."""
    return CpuBackend(schemes_of(options))


def _model(source: Source, build_config: BuildConfig) -> dict[str, Any]:
    model = engine_model(source.config, build_config.max_seq_len)
    if source.head is None:
        return model
    sizes = head_json(source.head)
    return model | ({"medusa": sizes, "tied": True} if isinstance(source.head, MedusaHeads) else {"head": sizes})


def head_json(head: Head) -> dict[str, Any]:
    """A head's object in an engine file's header."""
    if isinstance(head, MedusaHeads):
        return {"num_heads": head.config.num_heads, "num_layers": head.config.num_layers}
    if isinstance(head, MtpLayer):
        return {
            "layers": [head.config.layer],
            "num_features": head.config.model.hidden_size,
            "draft_vocab_size": head.config.model.vocab_size,
            "norm_before_residual": 0,
            "is_mtp": 1,
            "reads_normed": int(head.config.reads_normed),
        }
    config = head.config
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


def engine_tensors(
    config: ModelConfig, weights: Weights, scheme: Scheme | None = None
) -> Iterator[tuple[str, TensorSource]]:
    """Every tensor of the engine file, each made on demand and in this order. scheme: None for bf16."""
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = "model.embed_tokens.weight"
    yield "rope_inv_freq", rope_frequencies(config.rope, config.head_dim)[0]
    if not config.tie_word_embeddings:
        yield "embedding", lambda: weights.bfloat16(embedding, (vocab, hidden))
    for i in range(config.num_layers):
        for name, source in _Layer(config, weights, i, scheme).tensors():
            yield f"layers.{i}.{name}", source
    yield "final_norm", lambda: weights.float32("model.norm.weight", (hidden,))
    head = embedding if config.tie_word_embeddings else "lm_head.weight"
    head_scheme = scheme if scheme is not None and scheme.lm_head else None
    yield from _packed("lm_head", lambda: weights.bfloat16(head, (vocab, hidden)), head_scheme)


def _packed(
    name: str, read: Callable[[], npt.NDArray[np.uint16]], scheme: Scheme | None
) -> Iterator[tuple[str, TensorSource]]:
    """The tensors of one matrix: packed bf16, or packed integers and then their scales."""
    if scheme is None:
        yield name, lambda: pack_matrix(read())
        return
    scales: list[npt.NDArray[np.float32]] = []

    def words() -> npt.NDArray[np.uint32]:
        packed, its_scales = pack_quantized(_quantized(name, read(), scheme))
        scales.append(its_scales)
        return packed

    yield name, words
    yield f"{name}_scales", scales.pop


def _quantized(name: str, weight: npt.NDArray[np.uint16], scheme: Scheme) -> QuantizedWeight:
    try:
        parts = [
            quantize(float32_from_bfloat16(weight[first : first + _QUANTIZED_ROWS]), scheme)
            for first in range(0, len(weight), _QUANTIZED_ROWS)
        ]
    except ValueError as error:
        raise CheckpointError(f"{name} of the checkpoint cannot be quantised: {error}") from error
    values, scales = (np.concatenate([getattr(part, field) for part in parts]) for field in ("values", "scales"))
    return QuantizedWeight(values, scales, parts[0].group_size, parts[0].bits)


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


def mtp_tensors(head: MtpLayer) -> Iterator[tuple[str, TensorSource]]:
    """engine_tensors of an MTP layer."""
    config, weights, hidden = head.config.model, head.weights, head.config.model.hidden_size
    yield from engine_tensors(config, weights)
    yield "head.input_proj", lambda: pack_matrix(weights.embedding_first(hidden))
    yield "head.token_norm", lambda: weights.float32("token_layernorm.weight", (hidden,))
    yield "head.hidden_norm", lambda: weights.float32("hidden_layernorm.weight", (hidden,))


def medusa_tensors(heads: MedusaHeads) -> Iterator[tuple[str, TensorSource]]:
    """engine_tensors of Medusa heads: matrices of one kind lie one behind the other."""
    config, weights = heads.config, heads.weights
    hidden, vocab = config.hidden_size, config.vocab_size
    blocks = [(head, layer) for head in range(config.num_heads) for layer in range(config.num_layers)]

    def biases() -> npt.NDArray[np.float32]:
        padded = np.zeros((len(blocks), round_up(hidden, PANEL)), np.float32)
        for row, (head, layer) in zip(padded, blocks, strict=True):
            row[:hidden] = weights.float32(f"{head}.residual_bias.{layer}", (hidden,))
        return padded

    def packed(names: Iterable[str], num_out: int) -> npt.NDArray[np.uint32]:
        return np.concatenate([pack_matrix(weights.bfloat16(name, (num_out, hidden))) for name in names])

    yield "medusa.residual", lambda: packed((f"{head}.residual.{layer}" for head, layer in blocks), hidden)
    yield "medusa.residual_bias", biases
    yield "lm_head", lambda: packed((f"{head}.lm_head" for head in range(config.num_heads)), vocab)


class _Layer:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        index: int,
        scheme: Scheme | None = None,
        num_inputs: int | None = None,
    ) -> None:
        """scheme: None for bf16. num_inputs: of q, k and v, where it is not hidden_size."""
        self._config = config
        self._scheme = scheme
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
        yield from _packed("qkv", lambda: self._rows(self._qkv, 1, self._num_inputs), self._scheme)
        if config.qkv_bias:
            yield "qkv_bias", lambda: self._biases(self._qkv, 1)
        if config.qk_norm:
            yield "q_norm", lambda: self._vector("self_attn.q_norm.weight", config.head_dim)
            yield "k_norm", lambda: self._vector("self_attn.k_norm.weight", config.head_dim)
        yield from _packed("o", lambda: self._matrix("self_attn.o_proj", hidden, q_size), self._scheme)
        if config.o_bias:
            yield "o_bias", lambda: self._vector("self_attn.o_proj.bias", hidden)
        yield "post_norm", lambda: self._vector("post_attention_layernorm.weight", hidden)
        yield from _packed("gate_up", lambda: self._rows(self._gate_up, PANEL, hidden), self._scheme)
        if config.mlp_bias:
            yield "gate_up_bias", lambda: self._biases(self._gate_up, PANEL)
        yield from _packed("down", lambda: self._matrix("mlp.down_proj", hidden, inner), self._scheme)
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
