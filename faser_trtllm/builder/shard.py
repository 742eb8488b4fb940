"""The part of a model that one rank holds.

Matrices are split by outputs. One rank computes an output element entirely, so results do not depend on the number of
ranks. A KV head is on the rank of its query heads; embedding and norms are on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.config import ModelConfig

_MULTIPLES = {"num_heads": 1, "num_kv_heads": 1, "intermediate_size": 8, "hidden_size": 8, "vocab_size": 1}
"""Each rank's part of a size must be a multiple of this, because kernels read eight values at once."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part that rank `rank` of `size` ranks holds."""

    rank: int = 0
    size: int = 1

    def sizes(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's sizes with this rank's heads and intermediate_size; the others stay."""
        own = {name: model[name] // self.size for name in ("num_heads", "num_kv_heads", "intermediate_size")}
        return dict(model) | own

    def part(self, count: int) -> slice:
        """Return this rank's slice of `count` outputs."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def rows(self, name: str, count: int, model: Mapping[str, Any]) -> list[slice]:
        """Return the slices of a tensor's `count` rows that this rank reads, in order (cuda_engine_file.py)."""
        matrix = name.rpartition(".")[2].removesuffix("_bias")
        if self.size == 1 or matrix not in ("qkv", "o", "gate_up", "down", "lm_head"):
            return [slice(0, count)]
        counts = [count]
        if matrix == "qkv":
            heads = (model["num_heads"], model["num_kv_heads"], model["num_kv_heads"])
            counts = [number * model["head_dim"] for number in heads]
        elif matrix == "gate_up":
            counts = [count // 2, count // 2]
        found, first = [], 0
        for number in counts:
            own = self.part(number)
            found.append(slice(first + own.start, first + own.stop))
            first += number
        return found


def check_tp_size(tp_size: int, config: ModelConfig) -> None:
    """Raise InvalidArgumentError if a model cannot be split over tp_size ranks."""
    if config.experts is not None:
        raise InvalidArgumentError(
            f"tp_size is {tp_size}, but the target is a mixture of experts, which one GPU holds whole; set it to 1"
        )
    for name, multiple in _MULTIPLES.items():
        size = getattr(config, name)
        if size % (tp_size * multiple):
            equal = "an equal part" if multiple == 1 else f"an equal part, a multiple of {multiple}"
            raise InvalidArgumentError(
                f"tp_size is {tp_size}, but the target's {name} is {size}, of which each rank needs {equal}; take a "
                "smaller tp_size"
            )
