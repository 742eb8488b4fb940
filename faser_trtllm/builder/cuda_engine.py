"""The cuda backend of `faser build`: a checkpoint's weights, fused and converted; kernels are compiled at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from faser_trtllm.builder.backend import Progress
from faser_trtllm.builder.cpu_engine import DEFAULT_TOKENS_PER_BLOCK, engine_model, head_json
from faser_trtllm.builder.cuda_engine_file import VERSION, Array, Shape, num_bytes, tensor_shapes, write_cuda_file
from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.builder.options import BuildOptions
from faser_trtllm.builder.shard import check_tp_size
from faser_trtllm.builder.source import Eagle3Head, MedusaHeads, MtpLayer, Source
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.rope import rope_frequencies
from faser_trtllm.models.weights import Weights
from faser_trtllm.ops.cuda.verify_attention import HEAD_DIMS


class CudaBackend:
    """EngineBuilder (builder/backend.py) of the cuda engine. Needs no GPU, no CUDA and no torch."""

    def __init__(self, dtype: str, tp_size: int = 1) -> None:
        self._dtype = dtype
        self._tp_size = tp_size

    def tokens_per_block(self, wanted: int | None, max_seq_len: int) -> int:
        size = wanted if wanted is not None else DEFAULT_TOKENS_PER_BLOCK
        if size < 16 or size % 16:
            raise InvalidArgumentError(f"tokens_per_block is {size}, it must be a multiple of 16")
        return size

    def identity(self, sources: Sequence[Source], build_config: BuildConfig) -> dict[str, Any]:
        for source in sources:
            if source.config.head_dim not in HEAD_DIMS:
                raise InvalidArgumentError(
                    f"head_dim is {source.config.head_dim} in the {source.role} checkpoint, the CUDA kernels have "
                    f"{', '.join(map(str, HEAD_DIMS))}; use --backend cpu or another checkpoint"
                )
        entries: dict[str, Any] = {"engine_file_version": VERSION}
        if self._tp_size > 1:
            check_tp_size(self._tp_size, sources[0].config)
            entries["tp_size"] = self._tp_size
        for source in sources:
            if source.head is not None:
                entries[source.head.kind] = {source.role: head_json(source.head)}
        return entries

    def engine_config(self, source: Source, build_config: BuildConfig) -> dict[str, Any]:
        return {} if source.head is None else {source.head.kind: head_json(source.head)}

    def min_bytes(self, source: Source, build_config: BuildConfig) -> int:
        return num_bytes(_sizes(source, build_config), self._dtype)

    def write_engine(self, path: Path, source: Source, build_config: BuildConfig, progress: Progress | None) -> None:
        model = _sizes(source, build_config)
        tensors, shapes = _Tensors(source, self._dtype), tensor_shapes(model)
        done = 0

        def on_tensor(name: str) -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(source.role, done, len(shapes))

        named = ((name, tensors.maker(name, shape)) for name, shape in shapes.items())
        write_cuda_file(path, model, list(source.segments), self._dtype, named, on_tensor)


def open_builder(options: BuildOptions) -> CudaBackend:
    """The cuda backend's builder."""
    return CudaBackend(options.dtype, options.tp_size)


def _sizes(source: Source, build_config: BuildConfig) -> dict[str, Any]:
    config, head = source.config, source.head
    sizes = engine_model(config, build_config.max_seq_len) | {
        "qkv_bias": config.qkv_bias,
        "o_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "qk_norm": config.qk_norm,
    }
    if isinstance(head, Eagle3Head):
        own = {"fc_bias": head.config.fc_bias, "target_ids": head.target_ids is not None}
        sizes["head"] = head_json(head) | own
    elif isinstance(head, MtpLayer):
        sizes["head"] = head_json(head)
    elif head is not None:
        sizes["medusa"] = head_json(head)
    return sizes


class _Tensors:
    """The file's tensors, made from those of a checkpoint."""

    def __init__(self, source: Source, dtype: str) -> None:
        self._config: ModelConfig = source.config
        self._weights: Weights = source.weights
        self._head = source.head if isinstance(source.head, Eagle3Head) else None
        self._medusa = source.head.weights if isinstance(source.head, MedusaHeads) else None
        self._dtype = dtype

    def maker(self, name: str, shape: Shape) -> Callable[[], Array]:
        return lambda: self._make(name, shape)

    def _make(self, name: str, shape: Shape) -> Array:
        config = self._config
        if self._medusa is not None and name.startswith("medusa."):
            return self._tensor(self._medusa, name.removeprefix("medusa."), shape)
        if name == "rope_inv_freq":
            return rope_frequencies(config.rope, config.head_dim)[0]
        if name == "head.target_ids":
            assert self._head is not None, "tensor_shapes() names it for heads"
            return np.asarray(self._head.target_ids, np.int64)
        return np.concatenate([self._tensor(self._weights, *part) for part in self._parts(name)])

    def _parts(self, name: str) -> Iterator[tuple[str, Shape]]:
        """The checkpoint tensors that make up one tensor of the file, and their shapes."""
        config = self._config
        hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        whole: dict[str, tuple[str, Shape]] = {
            "embedding": ("model.embed_tokens.weight", (vocab, hidden)),
            "lm_head": ("lm_head.weight", (vocab, hidden)),
            "final_norm": ("model.norm.weight", (hidden,)),
            "head.input_proj": ("input_proj.weight", (hidden, 2 * hidden)),
            "head.token_norm": ("token_layernorm.weight", (hidden,)),
            "head.hidden_norm": ("hidden_layernorm.weight", (hidden,)),
            "head.target_norm": ("target.norm.weight", (hidden,)),
        }
        width = hidden
        if self._head is not None:
            width, head = 2 * hidden, self._head.config
            whole["lm_head"] = ("lm_head.weight", (head.draft_vocab_size, hidden))
            whole["head.fc"], whole["head.fc_bias"] = ("fc.weight", (hidden, head.num_features)), ("fc.bias", (hidden,))
            whole["head.input_norm"] = ("model.layers.0.input_layernorm.weight", (hidden,))
            whole["head.hidden_norm"] = ("model.layers.0.hidden_norm.weight", (hidden,))
        if name in whole:
            yield whole[name]
            return
        _, index, part = name.split(".")
        layer = f"model.layers.{index}"
        vectors = {
            "input_norm": ("input_layernorm", hidden),
            "post_norm": ("post_attention_layernorm", hidden),
            "q_norm": ("self_attn.q_norm", config.head_dim),
            "k_norm": ("self_attn.k_norm", config.head_dim),
        }
        if part in vectors:
            yield f"{layer}.{vectors[part][0]}.weight", (vectors[part][1],)
            return
        linears = {
            "qkv": (("self_attn.q_proj", q_size), ("self_attn.k_proj", kv_size), ("self_attn.v_proj", kv_size)),
            "o": (("self_attn.o_proj", hidden),),
            "gate_up": (("mlp.gate_proj", inner), ("mlp.up_proj", inner)),
            "down": (("mlp.down_proj", hidden),),
        }
        widths = {"qkv": width, "o": q_size, "gate_up": hidden, "down": inner}
        linear, is_bias = part.removesuffix("_bias"), part.endswith("_bias")
        for source, size in linears[linear]:
            yield f"{layer}.{source}.{'bias' if is_bias else 'weight'}", (size,) if is_bias else (size, widths[linear])

    def _tensor(self, weights: Weights, name: str, shape: Shape) -> Array:
        if self._dtype == "bfloat16":
            return weights.bfloat16(name, shape)
        return weights.float32(name, shape).astype(np.float16)
