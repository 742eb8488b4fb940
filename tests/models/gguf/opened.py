"""An opened checkpoint with everything that a build would read of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from faser_trtllm.models.checkpoint.checkpoint import Checkpoint
from faser_trtllm.models.checkpoint.open import open_checkpoint
from faser_trtllm.models.weights import expected_shapes


@dataclass(frozen=True)
class Opened:
    checkpoint: Checkpoint

    def shape(self, name: str) -> tuple[int, ...]:
        return expected_shapes(self.checkpoint.config)[name]

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """bf16 bits of matrices, fp32 of vectors."""
        weights = self.checkpoint.weights
        for name, shape in expected_shapes(self.checkpoint.config).items():
            yield name, weights.bfloat16(name, shape) if len(shape) == 2 else weights.float32(name, shape)


@contextlib.contextmanager
def opened(path: Path, tokenizer_dir: Path | None = None) -> Iterator[Opened]:
    with contextlib.ExitStack() as stack:
        yield Opened(open_checkpoint(path, stack, tokenizer_dir))
