"""Errors of the cost model: mean absolute errors on public measurements (benchmarks/model), rounded up.

Without public measurements they are assumed; docs/plan.md lists the assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping

DECODE = {"h100": 0.08, "h200": 0.10, "b200": 0.25, "a100": 0.15, "l40s": 0.25}
"""Errors of a decode step by GPU, from the worst group of points; assumed for A100 and L40S."""
VERIFY = 0.10  # a pass by rows, on an H100
DRAFT = 0.20  # drafting, until a draft model is measured on the machine
OVERLAP = 0.30  # gain from two concurrent streams; there are few curves of SM shares
SPEED_UP = 0.12  # a step with drafts over one without, where most errors cancel; the worst of eight points


MIXTURE_DECODE = {"h100": 0.10, "h200": 0.18, "b200": 0.13, "a100": 0.20, "l40s": 0.35}
"""Errors of mixtures of experts, for which engines' kernels differ more."""
MIXTURE_VERIFY = 0.25  # assumed: the overlap of a request's rows depends on model and text
MIXTURE_SPEED_UP = 0.26  # from two points


def error_by_kind(gpu: str, *, is_mixture: bool = False) -> Mapping[str, float]:
    """Return the model's errors in the form of CostTable.held_out_errors."""
    decode, verify = (MIXTURE_DECODE[gpu], MIXTURE_VERIFY) if is_mixture else (DECODE[gpu], VERIFY)
    return {"decode": decode, "verify": max(decode, verify), "draft_step": max(DECODE[gpu], DRAFT), "overlap": OVERLAP}
