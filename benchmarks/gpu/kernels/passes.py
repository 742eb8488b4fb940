"""Whole passes: the layers' kernels, modeled, and products and everything else as measured; and what they should take.

A pass of the 8B has 512 tokens of context before its rows. `measured.json` has the times of an H100 and an H200.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.kernels.acceptance import VOCAB_SIZE, accept_shape
from benchmarks.gpu.kernels.attention import (
    APPEND_CONTEXT,
    DRAFT,
    DRAFT_HIDDEN,
    PASS_CONTEXT,
    TARGET,
    TARGET_HIDDEN,
    AttentionCase,
    append_shape,
)
from benchmarks.gpu.kernels.expected import Times
from benchmarks.gpu.kernels.layers import DRAFT_INNER, TARGET_INNER, silu_shape
from benchmarks.gpu.models.enlarge import SHAPES

MEASURED = Path(__file__).parent / "measured.json"


@dataclass(frozen=True)
class Claim:
    """A time that is claimed. model: "target", "draft" (a step) or "accept"; rows: of each request."""

    model: str
    num_requests: int
    num_rows: int
    goal_ms: float

    @property
    def name(self) -> str:
        if self.model == "accept":
            return f"seeded acceptance, {self.num_requests} x {self.num_rows} rows of {VOCAB_SIZE} logits"
        what = "8B" if self.model == "target" else "0.3B, a draft step"
        return f"{what}, context {PASS_CONTEXT}, {self.num_requests} x {self.num_rows} rows"

    @property
    def cases(self) -> tuple[tuple[str, str], ...]:
        """The op and shape of each launch of a layer, or of acceptance."""
        n, rows = self.num_requests, self.num_rows
        if self.model == "accept":
            return (("accept", accept_shape(n, rows - 1, VOCAB_SIZE, "seeded")),)
        heads, hidden_size, inner = (
            (TARGET, TARGET_HIDDEN, TARGET_INNER) if self.model == "target" else (DRAFT, DRAFT_HIDDEN, DRAFT_INNER)
        )
        return (
            ("append_kv", append_shape(AttentionCase(n, rows, APPEND_CONTEXT, *heads), hidden_size)),
            ("verify_attention", AttentionCase(n, rows, PASS_CONTEXT + rows, *heads).label),
            ("gated_silu", silu_shape(n * rows, inner, hidden_size)),
        )

    @property
    def num_products(self) -> int:
        """The matrix products of a layer."""
        return 0 if self.model == "accept" else 4

    def modeled_ms(self, times: Times, gpu: str) -> float:
        """Return the modeled time on "h100" or "h200"."""
        ours_us = sum(times[case] for case in self.cases)
        found = self._measured(gpu)
        if found is None:
            return 1e-3 * ours_us
        layers = SHAPES["8B" if self.model == "target" else "0.3B"].num_layers
        return 1e-3 * (float(found["products_us"]) + float(found["rest_us"]) + layers * ours_us)

    def measured_ms(self, gpu: str) -> float | None:
        """Return the time measured in 2026-11: of the H100 with the kernels before, of the H200 with those after."""
        found = self._measured(gpu)
        us = found["wall_us"] if found is not None else measured()["kernels_us"]["accept"][self.cases[0][1]].get(gpu)
        return None if us is None else 1e-3 * float(us)

    def _measured(self, gpu: str) -> Any:
        return measured()["passes"].get(self.model, {}).get(f"{self.num_requests} x {self.num_rows}", {}).get(gpu)


CLAIMS = (
    Claim("target", 1, 1, 5.6),
    Claim("target", 32, 1, 6.5),
    Claim("target", 128, 1, 9.0),
    Claim("target", 128, 5, 17.5),
    Claim("draft", 1, 1, 0.4),
    Claim("accept", 64, 5, 0.1),
)


@functools.cache
def measured() -> Mapping[str, Any]:
    """Return measured.json."""
    found: dict[str, Any] = json.loads(MEASURED.read_text())
    return found
