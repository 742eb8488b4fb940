"""An opened checkpoint of any format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint.

    tokenizer_files: the tokenizer's files for an engine directory, by name.
    files: paths of the files that an engine depends on, by name.
    stored_types: storage types of the matrices, such as BF16, F16, Q4_K or "GPTQ 4-bit".
    notes: sentences for the user about contradictions in the checkpoint.
    """

    path: Path
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    tokenizer_files: Mapping[str, bytes]
    files: Mapping[str, Path]
    stored_types: tuple[str, ...]
    notes: tuple[str, ...] = ()
