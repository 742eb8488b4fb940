"""The CPU backend of `faser build`, which fuses, pads and packs a model's weights into an engine file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.builder import engine_file
from faser_trtllm.builder.backend import Progress, paged_block_size, tensor_progress
from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.builder.engine_file import (
    MODEL_FIELDS,
    PANEL,
    ROW_MAJOR,
    TensorSource,
    pack_matrix,
    pack_quantized,
    round_up,
    row_multiple,
    scheme_for,
)
from faser_trtllm.builder.options import BuildOptions, schemes_of
from faser_trtllm.builder.source import Source
from faser_trtllm.errors import CheckpointError, InvalidArgumentError
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.fused import Part, fused_tensors, stacked
from faser_trtllm.models.heads.head import BlockDrafter, Eagle3Head, Head, MedusaHeads, MtpLayer
from faser_trtllm.models.quantized_weight import QuantizedWeight, Scheme, quantize
from faser_trtllm.models.rope import rope_frequencies
from faser_trtllm.models.vocabulary import VocabularyMap
from faser_trtllm.models.weights import Weights, float32_from_bfloat16

_QUANTIZED_ROWS = 4096  # rows quantized at once, which bounds memory


class CpuBackend:
    """An EngineBuilder that writes CPU engine files tensor by tensor. schemes: by role; other roles keep bf16."""

    def __init__(self, schemes: dict[str, Scheme] | None = None) -> None:
        self._schemes = schemes or {}

    def tokens_per_block(self, wanted: int | None, max_seq_len: int) -> int:
        return paged_block_size(wanted)

    def identity(self, sources: Sequence[Source], build_config: BuildConfig) -> dict[str, Any]:
        entries: dict[str, Any] = {"engine_file_version": engine_file.VERSION}
        for source in sources:
            if source.head is not None:
                entries[source.head.kind] = {source.role: head_json(source.head)}
            entries |= output_sizes(source)
        quantized = {
            source.role: quantization_entry(source, self._schemes[source.role])
            for source in sources
            if source.role in self._schemes
        }
        return entries | ({"quantization": quantized} if quantized else {})

    def engine_config(self, source: Source, build_config: BuildConfig) -> dict[str, Any]:
        scheme = self._schemes.get(source.role)
        quantized = {} if scheme is None else {"quantization": quantization_entry(source, scheme)}
        return quantized if source.head is None else {source.head.kind: head_json(source.head)}

    def min_bytes(self, source: Source, build_config: BuildConfig) -> int:
        sizes = engine_file.tensor_sizes(_model(source, build_config), self._schemes.get(source.role))
        return sum(nbytes for nbytes, required in sizes.values() if required)

    def write_engine(self, path: Path, source: Source, build_config: BuildConfig, progress: Progress | None) -> None:
        head, scheme = source.head, self._schemes.get(source.role)
        if isinstance(head, MedusaHeads):
            tensors = list(medusa_tensors(head))
        else:
            tensors = list(engine_tensors(source.config, source.weights, scheme, head, source.vocabulary))
        on_tensor = tensor_progress(source.role, len(tensors), progress)
        model = _model(source, build_config)
        engine_file.write_engine_file(path, model, list(source.segments), tensors, on_tensor, scheme)


def open_builder(options: BuildOptions) -> CpuBackend:
    return CpuBackend(schemes_of(options))


def quantization_entry(source: Source, scheme: Scheme) -> dict[str, Any]:
    """Return entries of TensorRT-LLM's QuantConfig; InvalidArgumentError if the scheme does not fit the model."""
    config = source.config
    if source.head is not None:
        raise InvalidArgumentError(
            f"{source.role}_quantization is {scheme}, but the {source.role} is {source.head}, which stays in bf16; "
            "leave it out"
        )
    if scheme.is_mxfp4 and config.experts is None:
        raise InvalidArgumentError(
            f"quantization of the {source.role} is mxfp4, which quantizes only experts, and a "
            f"{config.architecture} has none; leave it out"
        )
    inputs = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    if not scheme.is_mxfp4:
        inputs["num_attention_heads * head_dim"] = config.num_heads * config.head_dim
    if config.experts is not None and config.experts.shared_size and not scheme.is_mxfp4:
        inputs["shared_expert_intermediate_size"] = config.experts.shared_size
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
        "exclude_modules": ["lm_head", "*self_attn*"] if scheme.is_mxfp4 else [] if scheme.lm_head else ["lm_head"],
    }


def _model(source: Source, build_config: BuildConfig) -> dict[str, Any]:
    model = engine_model(source.config, build_config.max_seq_len)
    if source.head is None:
        return model | output_sizes(source)
    sizes = head_json(source.head)
    if isinstance(source.head, BlockDrafter):
        return model | {"block": sizes}
    return model | ({"medusa": sizes, "tied": True} if isinstance(source.head, MedusaHeads) else {"head": sizes})


def output_sizes(source: Source) -> dict[str, Any]:
    """Return the header entries of a draft with a VocabularyMap, whose LM head has fewer tokens; else {}."""
    return {} if source.vocabulary is None else {"num_outputs": len(source.vocabulary.target_ids)}


def head_json(head: Head) -> dict[str, Any]:
    """Return the object of a head in an engine file's header."""
    if isinstance(head, BlockDrafter):
        return head.sizes()
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
        "feeds_normed": int(config.feeds_normed),
        "num_fc_norms": config.num_fc_norms,
    }


def engine_model(config: ModelConfig, max_seq_len: int) -> dict[str, Any]:
    """Return the `model` object of an engine file's header."""
    _, factor = rope_frequencies(config.rope, config.head_dim)
    own = {"max_seq_len": max_seq_len, "rope_attention_factor": factor, "tied": config.tie_word_embeddings}
    sizes = {name: own[name] if name in own else getattr(config, name) for name in MODEL_FIELDS}
    sizes |= {"windows": list(config.windows), "has_sinks": config.has_sinks}
    sizes |= {"norms_all_heads": True} if config.norms_all_heads else {}
    return sizes if config.experts is None else sizes | {"experts": config.experts.sizes()}


def tensor_flags(config: ModelConfig, head: Head | None = None) -> dict[str, Any]:
    """Return the header entries that tell fused_tensors() which optional tensors exist, and the sizes of a head."""
    flags: dict[str, Any] = {name: getattr(config, name) for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")}
    if isinstance(head, MedusaHeads):
        return flags | {"medusa": head_json(head)}
    if isinstance(head, BlockDrafter):
        return flags | {"block": head_json(head)}
    if isinstance(head, Eagle3Head):
        own = {"fc_bias": head.config.fc_bias, "target_ids": head.target_ids is not None}
        return flags | {"head": head_json(head) | own}
    return flags if head is None else flags | {"head": head_json(head)}


def engine_tensors(
    config: ModelConfig,
    weights: Weights,
    scheme: Scheme | None = None,
    head: Eagle3Head | MtpLayer | BlockDrafter | None = None,
    vocabulary: VocabularyMap | None = None,
) -> Iterator[tuple[str, TensorSource]]:
    """Yield (name, source) of every tensor of the engine file in order, each made on demand. scheme: None for bf16."""
    yield "rope_inv_freq", rope_frequencies(config.rope, config.head_dim)[0]
    sizes = engine_model(config, 0) | tensor_flags(config, head)
    if vocabulary is not None:
        yield "output_ids", vocabulary.target_ids
        sizes["num_outputs"] = len(vocabulary.target_ids)
    for name, parts in fused_tensors(sizes).items():
        if name != "embedding" or not config.tie_word_embeddings:
            yield from _sources(name, parts, weights, scheme)
    if isinstance(head, Eagle3Head) and head.target_ids is not None:
        yield "head.target_ids", head.target_ids


def _sources(
    name: str, parts: Sequence[Part], weights: Weights, scheme: Scheme | None
) -> Iterator[tuple[str, TensorSource]]:
    """Yield the file's tensors for one fused tensor."""
    is_matrix = len(parts[0][1]) == 2

    def read(parts: Sequence[Part] = parts) -> npt.NDArray[Any]:
        as_stored, dtype = (weights.bfloat16, np.uint16) if is_matrix else (weights.float32, np.float32)
        found = stacked(as_stored, parts, dtype, row_multiple(name))
        # Its inputs begin with the normed embedding in the engine, with the normed hidden row in the checkpoint.
        return np.roll(found, found.shape[1] // 2, 1) if name == "head.input_proj" else found

    if is_matrix and name not in ROW_MAJOR:
        # Experts, which are padded to whole panels, are packed one by one because all of them need much memory.
        count = 1 if ".expert_" in name else len(parts)
        matrices = [functools.partial(read, parts[i : i + count]) for i in range(0, len(parts), count)]
        yield from _packed(name, matrices, scheme_for(name, scheme))
    else:
        yield name, read


def _packed(
    name: str, matrices: Sequence[Callable[[], npt.NDArray[np.uint16]]], scheme: Scheme | None
) -> Iterator[tuple[str, TensorSource]]:
    """Yield the tensors of consecutive matrices: packed bf16, or packed integers and then their scales."""
    if scheme is None:
        yield name, lambda: (pack_matrix(read()) for read in matrices)
        return
    scales: list[npt.NDArray[np.float32]] = []

    def words() -> Iterator[npt.NDArray[np.uint32]]:
        for read in matrices:
            packed, its_scales = pack_quantized(_quantized(name, read(), scheme))
            scales.append(its_scales)
            yield packed

    yield name, words
    yield f"{name}_scales", lambda: (scales.pop(0) for _ in matrices)


def _quantized(name: str, weight: npt.NDArray[np.uint16], scheme: Scheme) -> QuantizedWeight:
    try:
        parts = [
            quantize(float32_from_bfloat16(weight[first : first + _QUANTIZED_ROWS]), scheme)
            for first in range(0, len(weight), _QUANTIZED_ROWS)
        ]
    except ValueError as error:
        raise CheckpointError(f"{name} of the checkpoint cannot be quantized: {error}") from error
    values, scales = (np.concatenate([getattr(part, field) for part in parts]) for field in ("values", "scales"))
    return dataclasses.replace(parts[0], values=values, scales=scales)


def medusa_tensors(heads: MedusaHeads) -> Iterator[tuple[str, TensorSource]]:
    """Yield (name, source) of the tensors of Medusa heads; each stacks the matrices of all heads."""
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
