"""How far the model may be off: mean absolute errors on public measurements (benchmarks/model), rounded up.

Where nothing public was found, an assumption stands; docs/cost_model.md says which.
"""

from __future__ import annotations

from collections.abc import Mapping

DECODE = {"h100": 0.08, "h200": 0.10, "b200": 0.25, "a100": 0.15, "l40s": 0.25}
"""Errors of a decode step, by GPU: the worst group of points. A100 and L40S are assumed."""
VERIFY = 0.10  # of a pass by rows, on an H100
DRAFT = 0.20  # of drafting, before one draft model was measured on the machine
OVERLAP = 0.30  # of what two streams at once bring: the curves of SM shares are few
SPEED_UP = 0.12  # of a step with drafts over one without, where most errors cancel: the worst of eight points


def error_by_kind(gpu: str) -> Mapping[str, float]:
    """The model's errors in the form of CostTable.held_out_errors."""
    decode = DECODE[gpu]
    return {"decode": decode, "verify": max(decode, VERIFY), "draft_step": max(decode, DRAFT), "overlap": OVERLAP}
