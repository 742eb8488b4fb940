"""The cuda backend of `faser build`, which fuses and converts weights; kernels are compiled at run time."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from faser_trtllm.builder.backend import Progress, paged_block_size, tensor_progress
from faser_trtllm.builder.cpu_engine import engine_model, head_json, output_sizes, quantization_entry, tensor_flags
from faser_trtllm.builder.cuda_engine_file import (
    MXFP4_SUFFIX,
    VERSION,
    Array,
    num_bytes,
    tensor_parts,
    write_cuda_file,
)
from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.builder.options import BuildOptions, schemes_of
from faser_trtllm.builder.shard import check_tp_size
from faser_trtllm.builder.source import Source
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.fused import Part, stacked
from faser_trtllm.models.heads.head import BlockDrafter, Eagle3Head, MedusaHeads
from faser_trtllm.models.mxfp4 import scale_bytes
from faser_trtllm.models.quantized_weight import MXFP4, Scheme, quantize
from faser_trtllm.models.rope import rope_frequencies
from faser_trtllm.models.weights import Weights
from faser_trtllm.ops.cuda.experts.route_rows import MAX_EXPERTS
from faser_trtllm.ops.cuda.verify_attention import HEAD_DIMS, SINKS_HEAD_DIM

GROUPED_MULTIPLE = 8
"""Sizes of an expert must be multiples of this, so that rows of grouped products start at multiples of 16 bytes."""


class CudaBackend:
    """The EngineBuilder of the cuda engine. Needs no GPU, no CUDA and no torch."""

    def __init__(self, dtype: str, tp_size: int = 1, schemes: Mapping[str, Scheme] | None = None) -> None:
        """schemes: MXFP4 by role, for the experts of a mixture; those of other roles are in dtype."""
        self._dtype, self._tp_size = dtype, tp_size
        self._schemes = schemes or {}

    def tokens_per_block(self, wanted: int | None, max_seq_len: int) -> int:
        return paged_block_size(wanted)

    def identity(self, sources: Sequence[Source], build_config: BuildConfig) -> dict[str, Any]:
        for source in sources:
            if source.config.head_dim not in HEAD_DIMS:
                raise InvalidArgumentError(
                    f"head_dim is {source.config.head_dim} in the {source.role} checkpoint, the CUDA kernels have "
                    f"{', '.join(map(str, HEAD_DIMS))}; use --backend cpu or another checkpoint"
                )
            if source.config.has_sinks and source.config.head_dim != SINKS_HEAD_DIM:
                raise InvalidArgumentError(
                    f"head_dim is {source.config.head_dim} in the {source.role} checkpoint, whose attention has sinks; "
                    f"the CUDA kernels have sinks for {SINKS_HEAD_DIM} only; use --backend cpu"
                )
            _check_experts(source, self._dtype)
        entries: dict[str, Any] = {"engine_file_version": VERSION}
        if self._tp_size > 1:
            check_tp_size(self._tp_size, sources[0].config)
            entries["tp_size"] = self._tp_size
        for source in sources:
            window = min(filter(None, source.config.windows), default=0)
            if isinstance(source.head, Eagle3Head) and 0 < window < build_config.max_seq_len:
                raise InvalidArgumentError(
                    f"sliding_window of the EAGLE-3 head is {window}, which its CUDA kernels do not have; lower "
                    f"max_seq_len to {window} or use --backend cpu"
                )
            if isinstance(source.head, BlockDrafter) and self._dtype != "bfloat16":
                raise InvalidArgumentError(
                    f"dtype is {self._dtype}, but the {source.role} is {source.head}, and published ones lose nearly "
                    "all accepted drafts in it; use bfloat16"
                )
            if source.head is not None:
                entries[source.head.kind] = {source.role: head_json(source.head)}
            entries |= output_sizes(source)
        quantized = {source.role: entry for source in sources if (entry := self._quantization(source))}
        return entries | ({"quantization": quantized} if quantized else {})

    def engine_config(self, source: Source, build_config: BuildConfig) -> dict[str, Any]:
        entry = self._quantization(source)
        if source.head is not None:
            return {source.head.kind: head_json(source.head)}
        return {"quantization": entry} if entry else {}

    def min_bytes(self, source: Source, build_config: BuildConfig) -> int:
        return num_bytes(self._sizes(source, build_config), self._dtype)

    def _quantization(self, source: Source) -> dict[str, Any]:
        scheme = self._schemes.get(source.role)
        return {} if scheme is None else quantization_entry(source, scheme)

    def _sizes(self, source: Source, build_config: BuildConfig) -> dict[str, Any]:
        sizes = engine_model(source.config, build_config.max_seq_len) | tensor_flags(source.config, source.head)
        sizes |= {"expert_quantization": "mxfp4"} if source.role in self._schemes else {}
        return sizes | output_sizes(source)

    def write_engine(self, path: Path, source: Source, build_config: BuildConfig, progress: Progress | None) -> None:
        model = self._sizes(source, build_config)
        parts = tensor_parts(model)
        on_tensor = tensor_progress(source.role, len(parts), progress)
        named = ((name, functools.partial(self._make, source, name, parts[name])) for name in parts)
        write_cuda_file(path, model, list(source.segments), self._dtype, named, on_tensor)

    def _make(self, source: Source, name: str, parts: Sequence[Part]) -> Array:
        config, head, weights = source.config, source.head, source.weights
        if name == "rope_inv_freq":
            return rope_frequencies(config.rope, config.head_dim)[0]
        if name == "output_ids" and source.vocabulary is not None:
            return source.vocabulary.target_ids.astype(np.int64)
        if name == "head.target_ids" and isinstance(head, Eagle3Head):
            return np.asarray(head.target_ids, np.int64)
        if name.startswith("medusa.") and isinstance(head, MedusaHeads):
            weights = head.weights
        if name.endswith(MXFP4_SUFFIX):
            return _mxfp4(weights, parts)
        if self._dtype == "bfloat16":
            return stacked(weights.bfloat16, parts, np.uint16)
        return stacked(lambda *part: weights.float32(*part).astype(np.float16), parts, np.float16)


def _check_experts(source: Source, dtype: str) -> None:
    """Raise InvalidArgumentError for a mixture of experts that the kernels do not support."""
    config, experts = source.config, source.config.experts
    if experts is None:
        return
    of = f"the {source.role} is a mixture of experts"
    if source.head is not None:
        raise InvalidArgumentError(
            f"the {source.role} is {source.head} whose layers are mixtures of experts, which --backend cuda does not "
            "draft with; take another draft"
        )
    if dtype != "bfloat16":
        raise InvalidArgumentError(f"dtype is {dtype}, but {of}, whose grouped products are in bfloat16; use bfloat16")
    if experts.num_experts > MAX_EXPERTS:
        raise InvalidArgumentError(
            f"{of} with {experts.num_experts} experts in a layer; the CUDA kernels support at most {MAX_EXPERTS}; use "
            "--backend cpu"
        )
    sizes = {"hidden_size": config.hidden_size, "an expert's intermediate_size": experts.intermediate_size}
    for name, size in (sizes | {"the shared expert's intermediate_size": experts.shared_size}).items():
        if size % GROUPED_MULTIPLE:
            raise InvalidArgumentError(
                f"{of}, and {name} is {size}, of which grouped products need a multiple of {GROUPED_MULTIPLE}; use "
                "--backend cpu"
            )


def _mxfp4(weights: Weights, parts: Sequence[Part]) -> Array:
    """Return matrices, stacked, in MXFP4: uint8 [outs, in / 2 + in / 32], the numbers of a row and then its scales."""
    num_outs, width = sum(shape[0] for _, shape in parts), parts[0][1][1]
    found, start = np.empty((num_outs, width // 2 + width // MXFP4.group_size), np.uint8), 0
    for name, shape in parts:
        matrix, end = quantize(weights.float32(name, shape), MXFP4), start + shape[0]
        found[start:end, : width // 2] = matrix.values
        found[start:end, width // 2 :] = scale_bytes(matrix.scales)
        start = end
    return found


def open_builder(options: BuildOptions) -> CudaBackend:
    return CudaBackend(options.dtype, options.tp_size, schemes_of(options))
