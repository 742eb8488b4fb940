"""Records of an answer's draft tokens: vLLM's `metrics.speculative_decoding`, and the use of a prediction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from faser_trtllm.serving.client import Response

LEVELS = ("none", "summary", "detailed")
"""Values of --per-request-spec-decode-metrics, as in vLLM: detailed adds the numbers of each step."""


def metrics(level: str, final: Response | None) -> dict[str, Any]:
    """Return {"metrics": ...} for the last response of an answer's only sequence; {} if it has no counts."""
    found = None if final is None else final.acceptance
    if level == "none" or found is None:
        return {}
    num_accepted, num_drafted = sum(found.accepted), sum(found.drafted)
    num_steps = sum(found.histogram)
    record = {
        "mean_acceptance_length": 1.0 + (num_accepted / num_steps if num_steps else 0.0),
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": list(found.histogram),
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": found.max_draft_len,
    }
    if level == "detailed" and num_steps:
        record |= {"per_step_accepted": list(found.accepted), "per_step_drafted": list(found.drafted)}
    return {"metrics": {"speculative_decoding": record}}


def prediction_usage(finals: Iterable[Response | None]) -> dict[str, int]:
    """Return usage.completion_tokens_details from the last response of each sequence; {} without a prediction."""
    used = [final.prediction for final in finals if final is not None and final.prediction is not None]
    if not used:
        return {}
    accepted, rejected = map(sum, zip(*used, strict=True))
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
