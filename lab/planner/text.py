"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from lab.planner.advice import notes, service_config
from lab.planner.plan import Band, Plan, Run

HEADINGS = ("system", "tokens/s", "over off", "TTFT p50, p99 ms", "TPOT p50, p99 ms", "in time", "accepted")


def render_text(plan: Plan) -> str:
    q = plan.question
    lines = [
        f"{q['num_gpus']} x {q['gpu']}, {q['target']} with {q['draft']}, quantization {q['quantization']}",
        f"requests of {q['prompt_len_mean']} tokens in and {q['output_len_mean']} out in the mean; times {plan.source}",
        "",
        "Memory of one GPU:",
    ]
    for name, room in plan.memory.items():
        lines.append(
            f"  {name}: {room.weights_gb:.1f} GB of weights, {room.kv_gb:.1f} GB of cache for {room.kv_tokens} tokens, "
            f"so {room.max_batch_size} requests of {room.mean_len}"
        )
    for load in dict.fromkeys(run.load for run in plan.runs):
        lines += ["", load, *_aligned([HEADINGS, *(cells(run) for run in plan.runs if run.load == load)])]
    lines += ["", f"Recommended: {plan.recommended}", "", service_config(plan)]
    return "\n".join([*lines, *notes(plan)]) + "\n"


def cells(run: Run) -> tuple[str, ...]:
    """Return the columns of HEADINGS."""
    ttft, tpot = run.ttft_ms, run.tpot_ms
    return (
        run.system,
        show(run.tokens_per_s, 0),
        "1" if run.system == "off" else show(run.speed_up, 2),
        f"{show(ttft['p50'], 0)}, {show(ttft['p99'], 0)}",
        f"{show(tpot['p50'], 1)}, {show(tpot['p99'], 1)}",
        f"{run.goodput.value:.0%} ({run.goodput.low:.0%}-{run.goodput.high:.0%})",
        f"{run.acceptance:.0%}" if run.acceptance else "",
    )


def show(band: Band, digits: int) -> str:
    """Return a text such as "8,554 (7,776-9,409)"."""
    return f"{band.value:,.{digits}f} ({band.low:,.{digits}f}-{band.high:,.{digits}f})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
