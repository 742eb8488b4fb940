"""Configuration of a mixture of experts: sizes, routing and activation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

SOFTMAX = "softmax"
TOP_K_SOFTMAX = "top_k_softmax"
SILU = "silu"
CLAMPED = "clamped"
GATE_LIMIT = 7.0
"""Bound of the clamped activation's inputs: gate <= GATE_LIMIT and |up| <= GATE_LIMIT."""
GATE_ALPHA = 1.702


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a layer.

    Each row uses the top_k experts with the largest scores (ties: the lowest index) and adds their weighted outputs in
    ascending order of index.

    intermediate_size: width of one expert.
    scoring: "softmax" over all experts, or "top_k_softmax" over the logits of the chosen ones.
    norm_topk: divide the weights by their sum ("softmax" only).
    activation: "silu", silu(gate) * up; or "clamped", (up + 1) * gate * sigmoid(1.702 gate), see GATE_LIMIT.
    has_bias: the router and every expert's matrices have biases.
    shared_size: width of an expert that every row uses, times sigmoid(shared_gate . x); 0 for none.
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
        """Return the object `experts` of an engine file's header: the fields by their names."""
        return dataclasses.asdict(self)


def experts_of(sizes: Mapping[str, Any]) -> ExpertsConfig:
    """Rebuild an ExpertsConfig from sizes(); ValueError for impossible values, TypeError for unknown fields."""
    found = ExpertsConfig(**sizes)
    numbers = (found.num_experts, found.top_k, found.intermediate_size, found.shared_size)
    is_wrong = any(type(number) is not int or not 0 <= number < 2**31 for number in numbers)
    is_wrong |= type(found.norm_topk) is not bool or type(found.has_bias) is not bool
    is_wrong |= found.scoring not in (SOFTMAX, TOP_K_SOFTMAX) or found.activation not in (SILU, CLAMPED)
    if is_wrong or not 1 <= found.top_k <= found.num_experts:
        raise ValueError(f"model.experts is {dict(sizes)!r:.200}")
    return found
