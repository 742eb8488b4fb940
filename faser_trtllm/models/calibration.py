"""Calibrate static scales of FP8 activations: record the largest input of each matrix while a model reads a text.

This is ModelOpt's max calibration on a shorter text. Needs torch.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from faser_trtllm.errors import CheckpointError, ConfigError, InvalidArgumentError, reason_of
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.fp8 import scale_of
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import Weights

if TYPE_CHECKING:
    import torch

WINDOW_TOKENS = 256
NUM_WINDOWS = 4
"""Calibration reads this many windows from the start of the text, each from position 0."""

_DEFAULT_FILE = "argparse.py"  # English sentences and code, in every installation of Python


def calibration_text(path: Path | None) -> str:
    """Return a text file's contents, by default a module of the standard library; InvalidArgumentError if unusable."""
    file = path or Path(sysconfig.get_paths()["stdlib"]) / _DEFAULT_FILE
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"calib_dataset is {file}, which cannot be read ({reason_of(error)}); name a text file in UTF-8"
        ) from error
    if not text.strip():
        raise InvalidArgumentError(f"calib_dataset is {file}, which is empty; name a file with some text")
    return text


def calibrate_input_scales(config: ModelConfig, weights: Weights, token_ids: Sequence[int]) -> dict[str, float]:
    """Return {name of a matrix without .weight: scale of its inputs}, which is their largest absolute value / 448.

    Reads each weight when it is used. ConfigError without torch; CheckpointError if an input is not finite.
    """
    try:
        model = _Watched(config, weights)
    except ImportError as error:
        raise ConfigError(
            f"quantization is FP8, and torch, which calibrates the activations, cannot be imported ({error}); install "
            "torch, or build from a checkpoint with input_scale tensors"
        ) from error
    size = min(WINDOW_TOKENS, config.max_position_embeddings)
    for start in range(0, min(len(token_ids), NUM_WINDOWS * size), size):
        model.hidden_rows(token_ids[start : start + size])
    return {name: float(scale_of(value)) for name, value in model.largest.items()}


class _Watched(ReferenceModel):
    """A reference model that records the largest absolute input of each matrix."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights, is_streamed=True)
        self.largest: dict[str, float] = {}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        value = float(x.abs().max())
        if not math.isfinite(value):
            raise CheckpointError(f"the inputs of {name} are not finite on the calibration's text: {value}")
        self.largest[name] = max(self.largest.get(name, 0.0), value)
        return super().linear(name, x)
