"""One opened checkpoint, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """files: what an engine depends on, by name. tokenizer_files: what an engine directory takes of the tokenizer, by
    name. stored_types: how the matrices are stored, such as BF16, F16, Q4_K or "GPTQ 4-bit". notes: sentences about
    what contradicts itself in it.
    """

    path: Path
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    tokenizer_files: Mapping[str, bytes]
    files: Mapping[str, Path]
    stored_types: tuple[str, ...]
    notes: tuple[str, ...] = ()
