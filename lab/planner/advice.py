"""Advice on a plan: the recommended faser.yaml, the commands, and notes."""

from __future__ import annotations

from faser_trtllm.core.cost_table import MODELED
from lab.costmodel.measured import NAMES
from lab.planner.plan import MAX_DRAFT_LEN, Plan
from lab.planner.systems import OFF, SYSTEMS


def service_config(plan: Plan) -> str:
    """Return the recommended faser.yaml."""
    system = SYSTEMS[plan.recommended]
    room = plan.memory[system.drafter]
    lines = [
        f"# By `faser plan`: {_title(plan)}.",
        f"speculation: {system.speculation}",
        f"max_batch_size: {batch_size(plan)}",
        f"max_num_tokens: {plan.question['max_num_tokens']}",
    ]
    lines += [f"max_draft_len: {MAX_DRAFT_LEN}"] if system.drafter != OFF else []
    lines += ["kv_cache_config:", f"  max_tokens: {room.kv_tokens}"]
    lines += ["  dtype: fp8", "quantization: fp8"] if plan.question["quantization"] == "fp8" else []
    return "\n".join(lines) + "\n"


def batch_size(plan: Plan) -> int:
    """Return the largest load that fits in memory; for open loops the requests that fit."""
    room = plan.memory[SYSTEMS[plan.recommended].drafter]
    in_flight = [run.concurrency for run in plan.runs]
    largest = max((c for c in in_flight if c is not None), default=256)
    return max(1, min(room.max_batch_size, 256 if None in in_flight else largest))


def notes(plan: Plan) -> list[str]:
    """Return sentences on the plan's sources, errors and limits; the first says where the times come from."""
    found = []
    if plan.source == MODELED:
        found.append(
            f"All times are modeled from {plan.anchors}; nothing was measured on this GPU. `faser profile` on it "
            "gives a cost table for `--table`."
        )
    elif plan.question["table"] in NAMES:
        found.append(f"Times are {plan.anchors}; your models decide only the memory and the lengths that fit it.")
    errors = ", ".join(f"{kind} {error:.0%}" for kind, error in sorted(plan.error.items()))
    found.append(f"Bands are mean absolute errors of the cost table ({errors}), not limits.")
    curves = ", ".join(dict.fromkeys(plan.question["acceptance_curves"]))
    given = "yours" if not curves else f"InferenceX's golden one ({curves}; Apache-2.0, measured by them)"
    found.append(f"Acceptance is {given}, with the published spread over requests and rise by place.")
    if any(run.concurrency is None for run in plan.runs):
        found.append("Tokens per second of a trace count only the time with running requests.")
    bound = [run for run in plan.runs if run.is_memory_bound]
    if bound:
        names = ", ".join(dict.fromkeys(f"{run.load} with {run.system}" for run in bound))
        found.append(f"Not all requests fit into the memory at a time: {names}.")
    if any(run.overlapped_share > 0.05 for run in plan.runs):
        found.append("The gain from overlap is known to 30 % at best, so its bands are wider.")
    slower = [run for run in plan.runs if run.speed_up.value < 1.0]
    if slower:
        runs = ", ".join(f"{run.system} with {run.load} ({run.speed_up.value:.2f})" for run in slower)
        found.append(f"Slower than without speculation: {runs}.")
    if any(SYSTEMS[run.system].is_head for run in plan.runs):
        found.append(
            "The EAGLE-3 head and the block drafter are for comparison, with published sizes and modeled times, and "
            "are never recommended."
        )
    if plan.question["expert_overlap"] is not None:
        found.append(_experts_note(plan))
    if plan.question["is_expert_time_assumed"] and plan.source == MODELED:
        found.append(f"Times of experts are scaled from an H100's, since a {plan.question['gpu']} has no such tables.")
    return found


def _experts_note(plan: Plan) -> str:
    """Return a note on a pass's rows and the experts that they read."""
    q = plan.question
    reads = [
        f"{few:.0f} with {n} requests of one row, {many:.0f} with {1 + MAX_DRAFT_LEN} rows each"
        for n, (few, many) in plan.distinct_experts.items()
    ]
    of_layer = f", of {q['num_experts']} in a layer: {'; '.join(reads)}" if reads else ""
    return (
        f"{q['target']} is a mixture of experts, and a pass reads the experts that its rows use{of_layer}. Two rows of "
        f"a request are assumed to share {q['expert_overlap']:.0%} of their experts (--expert_overlap; 16 to 45 % were "
        "measured on other models): the less they share, the less speculation gains. So it gains least with few "
        "requests, and more with many, whose rows read nearly all experts anyway."
    )


def _title(plan: Plan) -> str:
    q = plan.question
    return f"{q['num_gpus']} x {q['gpu']}, {q['target']} with {q['draft']}"
