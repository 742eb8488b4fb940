"""The experts of a mixture: how many there are, how a row chooses among them, and what each computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

SOFTMAX = "softmax"
TOP_K_SOFTMAX = "top_k_softmax"
SILU = "silu"
CLAMPED = "clamped"
GATE_LIMIT = 7.0
"""Of the clamped activation: gate is at most this, up within plus and minus this."""
GATE_ALPHA = 1.702


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A layer's experts. A row takes the top_k of the largest scores, of equal ones those of the lowest index, and adds
    their outputs, weighted, in ascending order of index.

    intermediate_size: of one expert. scoring: "softmax", the scores are a softmax over all experts; or "top_k_softmax",
    the scores are the logits, and the weights a softmax over those that are taken. norm_topk: the weights are divided
    by their sum ("softmax" only). activation: "silu", silu(gate) * up; or "clamped", (up + 1) * gate * sigmoid(1.702
    gate) with gate at most 7 and up within -7 and 7. has_bias: of the router and of every expert's matrices.
    shared_size: width of an expert that every row takes, times sigmoid(shared_gate . x); 0: none.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: str
    norm_topk: bool
    activation: str = SILU
    has_bias: bool = False
    shared_size: int = 0

    def sizes(self) -> dict[str, Any]:
        """The object `experts` of an engine file's header: the fields by their names."""
        return dataclasses.asdict(self)


def experts_of(sizes: Mapping[str, Any]) -> ExpertsConfig:
    """ExpertsConfig.sizes undone; ValueError for what no mixture has, or TypeError for other fields."""
    found = ExpertsConfig(**sizes)
    numbers = (found.num_experts, found.top_k, found.intermediate_size, found.shared_size)
    is_wrong = any(type(number) is not int or not 0 <= number < 2**31 for number in numbers)
    is_wrong |= type(found.norm_topk) is not bool or type(found.has_bias) is not bool
    is_wrong |= found.scoring not in (SOFTMAX, TOP_K_SOFTMAX) or found.activation not in (SILU, CLAMPED)
    if is_wrong or not 1 <= found.top_k <= found.num_experts:
        raise ValueError(f"model.experts is {dict(sizes)!r:.200}")
    return found
