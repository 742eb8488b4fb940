"""Write tiny GGUF files, value by value, from the public description of the format (docs/gguf.md of ggml-org/ggml)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_LAYOUTS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
TYPE_F32, TYPE_F16, TYPE_Q4_0, TYPE_Q8_0, TYPE_BF16 = 0, 1, 2, 8, 30

Tensor = tuple[tuple[int, ...], int, bytes]
"""Shape [out, in], ggml's type id, data."""


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def typed(kind: int, value: Any) -> bytes:
    """A metadata value with its type in front; arrays are given as (element type, values)."""
    if kind == STRING:
        return struct.pack("<I", kind) + string(value)
    if kind == ARRAY:
        element, values = value
        body = [string(v) if element == STRING else struct.pack("<" + _LAYOUTS[element], v) for v in values]
        return struct.pack("<IIQ", kind, element, len(values)) + b"".join(body)
    return struct.pack("<I" + _LAYOUTS[kind], kind, value)


def gguf_bytes(
    metadata: dict[str, tuple[int, Any]], tensors: dict[str, Tensor], alignment: int = 32, version: int = 3
) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    parts += [string(key) + typed(kind, value) for key, (kind, value) in metadata.items()]
    offset = 0
    for name, (shape, kind, data) in tensors.items():
        dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        parts.append(string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset))
        offset += len(data) + -len(data) % alignment
    header = b"".join(parts)
    blobs = [data + bytes(-len(data) % alignment) for _, _, data in tensors.values()]
    return header + bytes(-len(header) % alignment) + b"".join(blobs)


def encode(values: np.ndarray, kind: int) -> bytes:
    return gguf.quantize(values.astype(np.float32), gguf.GGMLQuantizationType(kind)).tobytes()


def decode(data: bytes, kind: int, shape: tuple[int, ...]) -> np.ndarray:
    """The fp32 values that those bytes stand for."""
    return gguf.dequantize(np.frombuffer(data, np.uint8), gguf.GGMLQuantizationType(kind)).reshape(shape)


def gguf_of(checkpoint: Path, kind: int) -> tuple[dict[str, tuple[int, Any]], dict[str, Tensor]]:
    """A Hugging Face checkpoint as metadata and tensors; matrices whose rows have no whole blocks become F16."""
    config = json.loads((checkpoint / "config.json").read_text())
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    heads = {"attn_q.": config["num_attention_heads"], "attn_k.": config["num_key_value_heads"]}
    tensors: dict[str, Tensor] = {}
    for name, values in read_float32(checkpoint).items():
        theirs = names.get_name(name, (".weight", ".bias"))
        for part, num_heads in heads.items():
            if arch == "llama" and part in theirs:
                values = neighbors(values, num_heads)
        own = kind if values.ndim == 2 else TYPE_F32
        if own in (TYPE_Q4_0, TYPE_Q8_0) and values.shape[-1] % 32:
            own = TYPE_F16
        tensors[theirs] = (values.shape, own, encode(values, own))
    return metadata_of(config, arch) | tokenizer_of(checkpoint), tensors


def read_float32(checkpoint: Path) -> dict[str, np.ndarray]:
    files = sorted(checkpoint.glob("*.safetensors"))
    return {name: tensor.float().numpy() for file in files for name, tensor in load_file(file).items()}


def neighbors(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows i and i + d/2 of each head become rows 2i and 2i + 1: the llama architecture's rope rotates neighbors."""
    rows = values.reshape(num_heads, 2, len(values) // num_heads // 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(values.shape)


def metadata_of(config: dict[str, Any], arch: str) -> dict[str, tuple[int, Any]]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    metadata: dict[str, tuple[int, Any]] = {
        "general.architecture": (STRING, arch),
        "general.name": (STRING, "tiny"),
        f"{arch}.block_count": (U32, config["num_hidden_layers"]),
        f"{arch}.context_length": (U32, config["max_position_embeddings"]),
        f"{arch}.embedding_length": (U32, config["hidden_size"]),
        f"{arch}.feed_forward_length": (U32, config["intermediate_size"]),
        f"{arch}.attention.head_count": (U32, config["num_attention_heads"]),
        f"{arch}.attention.head_count_kv": (U32, config["num_key_value_heads"]),
        f"{arch}.attention.key_length": (U32, head_dim),
        f"{arch}.attention.value_length": (U32, head_dim),
        f"{arch}.attention.layer_norm_rms_epsilon": (F32, config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": (F32, rope["rope_theta"]),
    }
    if config.get("sliding_window"):
        metadata[f"{arch}.attention.sliding_window"] = (U32, config["sliding_window"])
    if rope["rope_type"] in ("linear", "yarn"):
        metadata[f"{arch}.rope.scaling.type"] = (STRING, rope["rope_type"])
        metadata[f"{arch}.rope.scaling.factor"] = (F32, rope["factor"])
    if "original_max_position_embeddings" in rope:
        metadata[f"{arch}.rope.scaling.original_context_length"] = (U32, rope["original_max_position_embeddings"])
    return metadata


def tokenizer_of(checkpoint: Path) -> dict[str, tuple[int, Any]]:
    """The byte-level tokenizer of tests/support/checkpoints.py, whose two first tokens are special."""
    definition = json.loads((checkpoint / "tokenizer.json").read_text())
    vocab = sorted(definition["model"]["vocab"].items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in definition["model"]["merges"]]
    return {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "gpt-2"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [3, 3] + [1] * (len(tokens) - 2))),
        "tokenizer.ggml.merges": (ARRAY, (STRING, merges)),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 0),
        "tokenizer.ggml.add_bos_token": (BOOL, definition["post_processor"] is not None),
    }


def write_gguf(path: Path, checkpoint: Path, kind: int) -> Path:
    path.write_bytes(gguf_bytes(*gguf_of(checkpoint, kind)))
    return path
