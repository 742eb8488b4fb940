"""Write a model as a Hugging Face checkpoint, so that peers run the same weights as our engine."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from benchmarks.peers.gguf import WeightSource
from faser_trtllm.models.config import ModelConfig, read_json
from faser_trtllm.models.weights import SINGLE_FILE, expected_shapes


def write_checkpoint(directory: Path, source_dir: Path, config: ModelConfig, weights: WeightSource) -> None:
    """Write directory/config.json and model.safetensors (bf16).

    config: as in source_dir, except for the number of layers. weights: must have every tensor that config needs.
    """
    directory.mkdir(parents=True, exist_ok=True)
    settings = read_json(source_dir / "config.json") | {"num_hidden_layers": config.num_layers}
    (directory / "config.json").write_text(json.dumps(settings, indent=2))
    shapes = expected_shapes(config)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        nbytes = 2
        for dim in shape:
            nbytes *= dim
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / SINGLE_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            file.write(weights.bfloat16(name, shape).astype("<u2", copy=False).tobytes())
