"""How far the model may be off: mean absolute errors on public measurements (benchmarks/model), rounded up.

Where nothing public was found, an assumption stands; docs/plan.md says which.
"""

from __future__ import annotations

from collections.abc import Mapping

DECODE = {"h100": 0.08, "h200": 0.10, "b200": 0.25, "a100": 0.15, "l40s": 0.25}
"""Errors of a decode step, by GPU: the worst group of points. A100 and L40S are assumed."""
VERIFY = 0.10  # of a pass by rows, on an H100
DRAFT = 0.20  # of drafting, before one draft model was measured on the machine
OVERLAP = 0.30  # of what two streams at once bring: the curves of SM shares are few
SPEED_UP = 0.12  # of a step with drafts over one without, where most errors cancel: the worst of eight points


MIXTURE_DECODE = {"h100": 0.10, "h200": 0.18, "b200": 0.13, "a100": 0.20, "l40s": 0.35}
"""The same of mixtures of experts: engines' kernels differ more."""
MIXTURE_VERIFY = 0.25  # assumed, since the overlap of a request's rows depends on the model and the text
MIXTURE_SPEED_UP = 0.26  # of two points


def error_by_kind(gpu: str, *, is_mixture: bool = False) -> Mapping[str, float]:
    """The model's errors in the form of CostTable.held_out_errors."""
    decode, verify = (MIXTURE_DECODE[gpu], MIXTURE_VERIFY) if is_mixture else (DECODE[gpu], VERIFY)
    return {"decode": decode, "verify": max(decode, verify), "draft_step": max(DECODE[gpu], DRAFT), "overlap": OVERLAP}
