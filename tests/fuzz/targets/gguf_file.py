"""GGUF files as structures and back, and small ones to begin with."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.scratch import folder
from tests.fuzz.target import Codec
from tests.support import gguf_writer as writer
from tests.support.checkpoints import make_checkpoint
from tests.support.moe_checkpoints import make_moe_checkpoint
from tests.support.published_mixtures import write_mixture

_LAYOUTS = {
    writer.U8: "B",
    writer.I8: "b",
    writer.U16: "H",
    writer.I16: "h",
    writer.U32: "I",
    writer.I32: "i",
    writer.F32: "f",
    writer.BOOL: "B",
    writer.U64: "Q",
    writer.I64: "q",
    writer.F64: "d",
}


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, layout: str) -> Any:
        (value,) = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return value

    def string(self) -> str:
        size = self.take("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == writer.STRING:
            return self.string()
        if kind == writer.ARRAY:
            element, count = self.take("I"), self.take("Q")
            return [element, [self.value(element) for _ in range(count)]]
        return self.take(_LAYOUTS[kind])


def _decode(data: bytes) -> Any:
    """[version, {key: [type, value]}, [[name, dims, type, offset]], the tensors' data]."""
    reader = _Reader(data)
    reader.at = 4
    version, num_tensors, num_keys = reader.take("I"), reader.take("Q"), reader.take("Q")
    metadata = {}
    for _ in range(num_keys):
        key, kind = reader.string(), reader.take("I")
        metadata[key] = [kind, reader.value(kind)]
    tensors = []
    for _ in range(num_tensors):
        name = reader.string()
        dims = [reader.take("Q") for _ in range(reader.take("I"))]
        tensors.append([name, dims, reader.take("I"), reader.take("Q")])
    return [version, metadata, tensors, data[reader.at + -reader.at % 32 :]]


def _string(text: Any) -> bytes:
    data = text if isinstance(text, bytes) else str(text).encode(errors="surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == writer.STRING:
        return _string(value)
    if kind == writer.ARRAY:
        element, items = value
        return struct.pack("<IQ", element, len(items)) + b"".join(_value(element, item) for item in items)
    if kind not in _LAYOUTS:
        return value if isinstance(value, bytes) else b""
    layout = _LAYOUTS[kind]
    if layout in "fd":
        return struct.pack("<" + layout, float(value))
    size = struct.calcsize(layout)
    return (int(value) & (2 ** (8 * size) - 1)).to_bytes(size, "little")


def _encode(value: Any) -> bytes:
    version, metadata, tensors, data = value
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    parts += [_string(key) + struct.pack("<I", kind) + _value(kind, item) for key, (kind, item) in metadata.items()]
    for name, dims, kind, offset in tensors:
        parts.append(_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
    header = b"".join(parts)
    return header + bytes(-len(header) % 32) + data


gguf_codec = Codec(_decode, _encode)


def _sentencepiece(metadata: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁", *"abcdefgh", "▁a", "ab"]
    tokens += [f"[PAD{place}]" for place in range(len(tokens), num_tokens)]
    types = [2, 3, 3, *[6] * 256, *[1] * 11, *[5] * num_tokens][:num_tokens]
    kept = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
    return kept | {
        "tokenizer.ggml.model": (writer.STRING, "llama"),
        "tokenizer.ggml.tokens": (writer.ARRAY, (writer.STRING, tokens[:num_tokens])),
        "tokenizer.ggml.scores": (writer.ARRAY, (writer.F32, [-float(i) for i in range(num_tokens)])),
        "tokenizer.ggml.token_type": (writer.ARRAY, (writer.I32, types)),
        "tokenizer.ggml.bos_token_id": (writer.U32, 1),
        "tokenizer.ggml.eos_token_id": (writer.U32, 2),
        "tokenizer.ggml.unknown_token_id": (writer.U32, 0),
        "tokenizer.ggml.padding_token_id": (writer.I32, 2),
        "tokenizer.ggml.add_eos_token": (writer.BOOL, True),
        "tokenizer.ggml.add_space_prefix": (writer.BOOL, True),
        "tokenizer.chat_template": (writer.STRING, "{{ messages }}"),
    }


def _checkpoint(name: str, **options: Any) -> Path:
    sizes = {"vocab_size": 280, "hidden_size": 4, "intermediate_size": 4, "num_layers": 1, "num_heads": 2}
    return make_checkpoint(folder(f"gguf-base/{name}"), name, num_kv_heads=1, **sizes | options)


def gguf_seeds() -> list[bytes]:
    found = []
    for name, kind in (("llama", writer.TYPE_F32), ("qwen2", writer.TYPE_F16), ("qwen3", writer.TYPE_BF16)):
        metadata, tensors = writer.gguf_of(_checkpoint(name), kind)
        found.append(writer.gguf_bytes(metadata, tensors))
    metadata, tensors = writer.gguf_of(_checkpoint("llama"), writer.TYPE_F16)
    found.append(writer.gguf_bytes(_sentencepiece(metadata, 280), tensors, version=2))
    rope = {
        "llama.rope.scaling.type": (writer.STRING, "yarn"),
        "llama.rope.scaling.factor": (writer.F32, 4.0),
        "llama.rope.scaling.original_context_length": (writer.U32, 64),
        "llama.rope.scaling.yarn_beta_fast": (writer.F32, 32.0),
        "llama.attention.sliding_window": (writer.U32, 16),
        "tokenizer.ggml.pre": (writer.STRING, "qwen2"),
        "general.alignment": (writer.U32, 32),
    }
    found.append(writer.gguf_bytes(metadata | rope, tensors))
    factors = {"rope_freqs.weight": ((1,), writer.TYPE_F32, np.array([8], "<f4").tobytes())}
    pre = {"tokenizer.ggml.pre": (writer.STRING, "llama-bpe")}
    found.append(writer.gguf_bytes(metadata | pre, tensors | factors))
    metadata, tensors = writer.gguf_of(_checkpoint("llama", hidden_size=32, intermediate_size=32), writer.TYPE_Q8_0)
    found.append(writer.gguf_bytes(metadata | {"tokenizer.ggml.pre": (writer.STRING, "smollm")}, tensors))
    found += [_mixture("qwen3"), _mixture("mixtral"), _mixture("gpt_oss")]
    return found + _damaged(found[0])


def _mixture(family: str) -> bytes:
    name = {"qwen3": "qwen3_moe"}.get(family, family)
    sizes = {"vocab_size": 280, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    path = make_moe_checkpoint(folder(f"gguf-base/{name}"), name, num_experts=2, top_k=1, expert_size=32, **sizes)
    return write_mixture(folder("gguf-base") / f"{name}.gguf", path, family, "F16").read_bytes()


def _damaged(good: bytes) -> list[bytes]:
    """One for each refusal of the reader that a change of one node does not lead to."""
    found = []
    settings = (
        {"split.count": 2},
        {"general.alignment": 3},
        {"llama.expert_count": 2},
        {"llama.attention.value_length": 3},
    )
    settings += ({"llama.attention.head_count": 0}, {"llama.block_count": 1000}, {"llama.rope.scaling.factor": 2})
    for more in settings:
        version, metadata, tensors, data = _decode(good)
        metadata |= {key: [writer.U32, value] for key, value in more.items()}
        found.append(_encode([version, metadata, tensors, data]))
    for name, kind in (("linear", 8), ("yarn", 8), ("none", 8), ("longrope", 8)):
        version, metadata, tensors, data = _decode(good)
        metadata |= {"llama.rope.scaling.type": [kind, name], "llama.rope.scaling.factor": [writer.F32, 2.0]}
        metadata |= {"llama.rope.scaling.extra": [writer.U32, 1]} if name == "none" else {}
        metadata |= {
            "llama.rope.scaling.attn_factor": [writer.F32, 1.0],
            "a.scores": [9, [6, [0.5]]],
            "b": [9, [9 if name == "longrope" else 6, []]],
        }
        found.append(_encode([version, metadata, tensors, data]))
    for place, change in ((0, "again"), (1, [0, 4]), (1, []), (1, [2**40, 2**40]), (2, 99), (3, 2**50), (3, 1)):
        version, metadata, tensors, data = _decode(good)
        tensors[0][place] = tensors[1][0] if place == 0 else change
        found.append(_encode([version, metadata, tensors, data]))
    keys = writer.string("k") + struct.pack("<II", writer.U32, 1)
    for version, body in ((1, b""), (3 << 24, b""), (3, 2 * keys), (3, writer.string("k") + struct.pack("<I", 77))):
        found.append(b"GGUF" + struct.pack("<IQQ", version, 0, 2) + body + bytes(64))
    many = struct.pack("<IIQ", writer.ARRAY, writer.STRING, 2**40)
    for value in (many, struct.pack("<IQ", writer.STRING, 2**40), struct.pack("<IQ", writer.STRING, 1) + b"\xff"):
        found.append(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + writer.string("k") + value + bytes(64))
    return [
        *found,
        b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40),
        b"GGUF",
        b"x" * 40,
    ]
