"""Writes a random checkpoint of the shape of Llama 3.2 1B, a layer at a time, to measure builds with.

python -m tests.builder.large_checkpoint DIRECTORY (docs/tensorrt.md has what was measured)
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from faser_trtllm.models.config import parse_model_config
from faser_trtllm.models.weights import bfloat16_from_float32, expected_shapes
from tests.support.checkpoints import write_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
_PIECE = 16 << 20  # values


def write_large_checkpoint(directory: Path) -> None:
    """2.5 GB in one file per layer, and one for the embedding; memory holds a few pieces of a tensor."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2))
    write_tokenizer(directory, 1000)
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in expected_shapes(parse_model_config(CONFIG)).items():
        part = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(f"model-{part}.safetensors", {})[name] = shape
    for number, (file, shapes) in enumerate(files.items()):
        _write(directory / file, shapes, np.random.default_rng(number))
    weight_map = {name: file for file, shapes in files.items() for name in shapes}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write(path: Path, shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    header, offset = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            for piece in _pieces(shape, rng):
                stream.write(piece.tobytes())


def _pieces(shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[np.ndarray]:
    left = int(np.prod(shape))
    mean, scale = (1.0, 0.1) if len(shape) == 1 else (0.0, shape[-1] ** -0.5)
    while left:
        count = min(left, _PIECE)
        values = rng.standard_normal(count, np.float32) * np.float32(scale) + np.float32(mean)
        yield bfloat16_from_float32(values)
        left -= count


if __name__ == "__main__":
    write_large_checkpoint(Path(sys.argv[1]))
