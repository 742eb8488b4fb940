"""Write a Llama or Qwen3-MoE checkpoint as GGUF for llama.cpp, without a vocabulary.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.weights import Bfloat16Array, float32_from_bfloat16

ALIGNMENT = 32
Q8_BLOCK = 32
# GGML's ids for tensor types and value types.
F32, Q8_0, BF16 = 0, 8, 30
UINT32, FLOAT32, STRING = 4, 6, 8
FILE_TYPES = {"bf16": 32, "q8_0": 7}
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3MoeForCausalLM": "qwen3moe"}


class WeightSource(Protocol):
    def bfloat16(self, name: str, shape: tuple[int, ...]) -> Bfloat16Array: ...


@dataclass(frozen=True)
class _Tensor:
    """A tensor. sources: names in the checkpoint, several for experts, which are consecutive. shape: of one source."""

    name: str  # in GGUF
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    kind: int
    num_heads: int = 0  # > 0: rows are reordered per head for GGUF's rope

    @property
    def dims(self) -> tuple[int, ...]:
        """Shape in GGUF's order, the inputs of a matrix first and experts last."""
        return (*self.shape[::-1], len(self.sources)) if len(self.sources) > 1 else self.shape[::-1]

    @property
    def nbytes(self) -> int:
        size = int(np.prod(self.dims))
        return {F32: 4 * size, BF16: 2 * size, Q8_0: size // Q8_BLOCK * (Q8_BLOCK + 2)}[self.kind]


def write_gguf(path: Path, config: ModelConfig, weights: WeightSource, dtype: str) -> None:
    """Write a model, one matrix in memory at a time; raise CheckpointError for one that is neither Llama nor Qwen3-MoE.

    weights: bf16 bits by Hugging Face names. dtype: bf16 or q8_0 (matrices whose rows are not multiples of 32
    stay bf16); norms and routers are fp32.
    """
    _check(config)
    tensors = list(_tensors(config, Q8_0 if dtype == "q8_0" else BF16))
    with path.open("wb") as file:
        metadata = _metadata(config, dtype)
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)))
        for key, (kind, value) in metadata.items():
            file.write(_string(key) + struct.pack("<I", kind) + _value(kind, value))
        offset = 0
        for tensor in tensors:
            dims = tensor.dims
            file.write(_string(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
            file.write(struct.pack("<IQ", tensor.kind, offset))
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        _pad(file)
        for tensor in tensors:
            for source in tensor.sources:
                file.write(_encode(tensor, weights.bfloat16(source, tensor.shape)))
            _pad(file)


def quantize_q8_0(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Quantize fp32 [..., n] to bytes [..., n / 32, 34]: per 32 values an fp16 scale and 32 signed bytes."""
    blocks = values.reshape(*values.shape[:-1], -1, Q8_BLOCK)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    # Rounds half away from zero like ggml's roundf; np.rint rounds to even.
    scaled = blocks * inverse
    quants = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return np.concatenate([scale.astype(np.float16).view(np.uint8), quants.view(np.uint8)], axis=-1)


def _check(config: ModelConfig) -> None:
    if config.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"the architecture is {config.architecture}, the GGUF writer knows {' and '.join(ARCHITECTURES)} only"
        )
    if config.rope.rope_type != "default":
        raise CheckpointError(f"rope_type is {config.rope.rope_type}, the GGUF writer knows default only")
    if config.qkv_bias or config.o_bias or config.mlp_bias:
        raise CheckpointError("the checkpoint has biases, the GGUF writer knows models without them only")
    if config.experts is not None and not config.experts.norm_topk:
        raise CheckpointError("norm_topk_prob is false, llama.cpp's qwen3moe always divides weights by their sum")


def _metadata(config: ModelConfig, dtype: str) -> dict[str, tuple[int, Any]]:
    arch = ARCHITECTURES[config.architecture]
    own: dict[str, tuple[int, Any]] = {
        "vocab_size": (UINT32, config.vocab_size),
        "context_length": (UINT32, config.max_position_embeddings),
        "embedding_length": (UINT32, config.hidden_size),
        "block_count": (UINT32, config.num_layers),
        "feed_forward_length": (UINT32, config.intermediate_size),
        "attention.head_count": (UINT32, config.num_heads),
        "attention.head_count_kv": (UINT32, config.num_kv_heads),
        "attention.key_length": (UINT32, config.head_dim),
        "attention.value_length": (UINT32, config.head_dim),
        "attention.layer_norm_rms_epsilon": (FLOAT32, config.rms_norm_eps),
        "rope.dimension_count": (UINT32, config.head_dim),
        "rope.freq_base": (FLOAT32, config.rope.theta),
    }
    if config.experts is not None:
        own |= {
            "expert_count": (UINT32, config.experts.num_experts),
            "expert_used_count": (UINT32, config.experts.top_k),
            "expert_feed_forward_length": (UINT32, config.experts.intermediate_size),
        }
    return {
        "general.architecture": (STRING, arch),
        "general.file_type": (UINT32, FILE_TYPES[dtype]),
        "general.alignment": (UINT32, ALIGNMENT),
        **{f"{arch}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": (STRING, "no_vocab"),
    }


def _tensors(config: ModelConfig, kind: int) -> Iterator[_Tensor]:
    hidden, inner, vocab, experts = config.hidden_size, config.intermediate_size, config.vocab_size, config.experts
    # Hugging Face's rope pairs dimension i with i + head_dim / 2, like all architectures in GGUF except llama.
    q_heads, kv_heads = (config.num_heads, config.num_kv_heads) if experts is None else (0, 0)

    def matrix(name: str, sources: str | tuple[str, ...], num_out: int, num_in: int, heads: int = 0) -> _Tensor:
        found = (sources,) if isinstance(sources, str) else sources
        return _Tensor(name, found, (num_out, num_in), kind if num_in % Q8_BLOCK == 0 else BF16, heads)

    def vector(name: str, source: str, size: int = hidden) -> _Tensor:
        return _Tensor(name, (source,), (size,), F32)

    yield matrix("token_embd.weight", "model.embed_tokens.weight", vocab, hidden)
    for i in range(config.num_layers):
        to, of = f"blk.{i}.", f"model.layers.{i}."
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        yield vector(to + "attn_norm.weight", of + "input_layernorm.weight")
        yield matrix(to + "attn_q.weight", of + "self_attn.q_proj.weight", q, hidden, q_heads)
        yield matrix(to + "attn_k.weight", of + "self_attn.k_proj.weight", kv, hidden, kv_heads)
        yield matrix(to + "attn_v.weight", of + "self_attn.v_proj.weight", kv, hidden)
        yield matrix(to + "attn_output.weight", of + "self_attn.o_proj.weight", hidden, q)
        if config.qk_norm:
            yield vector(to + "attn_q_norm.weight", of + "self_attn.q_norm.weight", config.head_dim)
            yield vector(to + "attn_k_norm.weight", of + "self_attn.k_norm.weight", config.head_dim)
        yield vector(to + "ffn_norm.weight", of + "post_attention_layernorm.weight")
        suffix, parts = "", [of + "mlp."]
        if experts is not None:
            yield _Tensor(to + "ffn_gate_inp.weight", (of + "mlp.gate.weight",), (experts.num_experts, hidden), F32)
            suffix, parts = "_exps", [f"{of}mlp.experts.{e}." for e in range(experts.num_experts)]
        for name, sizes in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            yield matrix(f"{to}ffn_{name}{suffix}.weight", tuple(f"{p}{name}_proj.weight" for p in parts), *sizes)
    yield vector("output_norm.weight", "model.norm.weight")
    if not config.tie_word_embeddings:
        yield matrix("output.weight", "lm_head.weight", vocab, hidden)


def _encode(tensor: _Tensor, bits: Bfloat16Array) -> bytes:
    if tensor.num_heads:
        bits = _interleave(bits, tensor.num_heads)
    if tensor.kind == BF16:
        return bits.astype("<u2").tobytes()
    values = float32_from_bfloat16(bits)
    return (values if tensor.kind == F32 else quantize_q8_0(values)).tobytes()


def _interleave(bits: Bfloat16Array, num_heads: int) -> Bfloat16Array:
    """Reorder rows from Hugging Face's rope, which pairs i with i + head_dim / 2, to neighbors for GGUF's llama."""
    head_dim = bits.shape[0] // num_heads
    found: Bfloat16Array = bits.reshape(num_heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(bits.shape)
    return found


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    return _string(value) if kind == STRING else struct.pack("<I" if kind == UINT32 else "<f", value)


def _pad(file: Any) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))
