"""Engines of a quantized checkpoint and of its weights, dequantized."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from faser_trtllm.builder.build import BuildOptions, build_engines
from tests.support.checkpoints import write_safetensors
from tests.support.engine_logits import NUM_TOKENS, engine_logits


def check_logits(folder: Path, same: Path, exact: dict[str, np.ndarray]) -> list[str]:
    """Engines of both give the same logits, bit for bit -> what the builds say. same: gets the exact weights."""
    write_safetensors(same, exact, "float32")
    logits, notes = [], []
    for number, path in enumerate((folder, same)):
        engines = build_engines(BuildOptions(path, None, same.parent / f"engines{number}"), note=notes.append)
        assert engines is not None
        logits.append(engine_logits(engines.target_path, list(range(NUM_TOKENS))))
    np.testing.assert_array_equal(*logits)
    return notes
