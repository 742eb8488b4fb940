"""A policy bench report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.markdown import table
from benchmarks.common.stats import summarize
from benchmarks.policies.options import OFF, SLICE_S
from benchmarks.policies.report import BURSTY, COMPUTE_BOUND_CONCURRENCY, Case, PolicyBenchReport

ALLOWED_LOSS = 0.03
WANTED_BURSTY = 1.3
WANTED_ORACLE = 0.9


def render_markdown(report: PolicyBenchReport) -> str:
    sections = [_head(report), _exactness(report), _goals(report), _ablation(report)]
    for expand in report.forms():
        sections += [_mean_ratios(report, expand), _throughput(report, expand)]
        sections += [_workload(report, expand, workload) for workload in report.workloads(expand)]
    sections.append(_calibration(report))
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(report: PolicyBenchReport) -> str:
    env, options = report.environment, report.options
    commit = f", commit {env['git_commit'][:12]}" if env["git_commit"] else ""
    changed = " with local changes" if env["git_dirty"] else ""
    held_out = "held out from the demo pair's training" if report.prompts["held_out"] else "not all of it held out"
    errors = "; ".join(
        f"x{form}: " + ", ".join(f"{kind} {100 * error:.1f}%" for kind, error in sorted(kinds.items()))
        for form, kinds in report.cost_error.items()
    )
    lines = [
        "# faser bench policies",
        "",
        f"{env['date']}, {env['cpu']}, {options['num_threads']} threads, {env['os']}{commit}{changed}.  ",
        f"Other processes used {100 * env['other_share']:.0f}% of the cores' time, "
        f"other machines {100 * env['steal_share']:.0f}%.  ",
        f"Prompts of {options['prompt_len']} tokens from the {report.prompts['source']} ({held_out}), "
        f"{options['min_tokens']} to {options['max_tokens']} new tokens, end ids ignored; a share of "
        f"{options['sampled_share']:g} of the requests is sampled at temperature {options['temperature']:g} with a "
        "seed, the others are greedy.  ",
        "SIMULATED: passes took the cost table's time and a step its mean overhead; tokens and confidences are real.  "
        if options.get("simulated")
        else "",
        f"The machine was up to {options['slowdown']:g} times slower for stretches of 0.2 to 3 s; rates are of the "
        "time that it would have taken at its best.  "
        if options.get("slowdown", 1.0) > 1.0
        else "",
        "Medians of rounds after a warm-up round, each with requests and an order of systems of its own; in a round "
        f"the systems take turns of {1e3 * SLICE_S:.0f} ms, and each one's clock runs in its turns only; "
        "the fixed lengths that were slowest in the warm-up round of a workload are left out of its measured rounds.  ",
        "In the bursty trace the clock jumps over idle time. The enlarged forms compute the same function as the "
        "trained pair: same acceptance, higher cost.  ",
        f"Cost tables' error on held-out points: {errors}.  " if errors else "",
        f"`{env['command_line']}`, {report.minutes:.1f} minutes.",
    ]
    return "\n".join(line for number, line in enumerate(lines) if line or number == 1)


def _exactness(report: PolicyBenchReport) -> str:
    verdict = "all tokens of all systems and rounds are identical to those of `off`."
    if report.differences:
        verdict = "NOT IDENTICAL: " + "; ".join(report.differences)
    lines = ["## Exactness", "", verdict]
    lines += [f"- did not run: {absence}" for absence in report.absences]
    return "\n".join(lines)


def _goals(report: PolicyBenchReport) -> str:
    """Return the project's three goals."""
    rows = []
    for expand in report.forms():
        for system in _deciders(report, expand):
            closed = [w for w in report.workloads(expand) if w != BURSTY]
            losses = [(r, w) for w in closed if (r := report.ratio_to_best(expand, w, system)) is not None]
            worst = min(losses, default=None)
            bursty = report.ratio_to_fixed(expand, BURSTY, system)
            oracles = [
                value
                for w in closed
                if int(w.split()[-1]) >= COMPUTE_BOUND_CONCURRENCY
                and (case := report.select(expand, w).get(system)) is not None
                and (value := case.median("oracle")) is not None
            ]
            rows.append(
                (
                    f"x{expand}",
                    system,
                    "-" if worst is None else f"{worst[0]:.3f} ({worst[1]}) {_met(worst[0] >= 1 - ALLOWED_LOSS)}",
                    "-" if bursty is None else f"{bursty:.3f} {_met(bursty >= WANTED_BURSTY)}",
                    "-" if not oracles else f"{min(oracles):.3f} {_met(min(oracles) >= WANTED_ORACLE)}",
                )
            )
    header = (
        "form",
        "system",
        f"lowest ratio to the best of off, fixed, schedule (goal {1 - ALLOWED_LOSS:g})",
        f"bursty, ratio to the best fixed (goal {WANTED_BURSTY:g})",
        f"lowest share of the oracle, concurrency >= {COMPUTE_BOUND_CONCURRENCY} (goal {WANTED_ORACLE:g})",
    )
    bounds = [
        f"On x{form} no policy that is at each load as fast as the fastest system here could beat the best fixed "
        f"length by more than {bound:.2f} times on any trace over these loads."
        for form, bound in report.bounds.items()
    ]
    return "## Goals\n\n" + "\n\n".join([table(header, rows), *bounds]) if rows else ""


def _mean_ratios(report: PolicyBenchReport, expand: int) -> str:
    """Return ratios to the best rival of the other rounds."""
    workloads = report.workloads(expand)
    rows = []
    for system in _deciders(report, expand):
        found = [report.mean_ratio_to_best(expand, workload, system) for workload in workloads]
        if any(found):
            rows.append((system, *("-" if r is None else f"{r.mean:.3f} ± {r.error:.3f}" for r in found)))
    if not rows:
        return ""
    title = f"## x{expand}: tok/s against the best of off, fixed and schedule in the other rounds"
    note = "Geometric mean over the rounds and its standard error; the rival of a round is picked by the others."
    return f"{title}\n\n{note}\n\n" + table(("system", *workloads), rows)


def _met(yes: bool) -> str:
    return "met" if yes else "NOT met"


def _deciders(report: PolicyBenchReport, expand: int) -> list[str]:
    names = dict.fromkeys(case.system for case in report.cases if case.expand == expand)
    return [name for name in names if name.startswith("price")]


def _ablation(report: PolicyBenchReport) -> str:
    by_form = {expand: report.ablation(expand) for expand in report.forms()}
    systems = list(dict.fromkeys(name for ratios in by_form.values() for name in ratios))
    rows = [
        (name, *(f"{ratios[name]:.3f}" if name in ratios else "-" for ratios in by_form.values())) for name in systems
    ]
    header = ("system", *(f"x{expand}" for expand in by_form))
    return "## Ablation: geometric mean over the workloads of tok/s against off\n\n" + table(header, rows)


def _throughput(report: PolicyBenchReport, expand: int) -> str:
    workloads = report.workloads(expand)
    systems = list(dict.fromkeys(case.system for case in report.cases if case.expand == expand))
    rows = []
    for system in systems:
        cells = []
        for workload in workloads:
            case = report.select(expand, workload).get(system)
            cells.append("-" if case is None else _rate(report, case))
        rows.append((system, *cells))
    title = f"## x{expand}: output tok/s (against off: the median of the rounds' ratios, their range)"
    return f"{title}\n\n" + table(("system", *workloads), rows)


def _rate(report: PolicyBenchReport, case: Case) -> str:
    text = f"{summarize(case.rates()).median:.0f}"
    off = report.select(case.expand, case.workload).get(OFF)
    if off is not None and off is not case:
        text += f" ({report.ratio(case, off).words()})"
    return text


def _workload(report: PolicyBenchReport, expand: int, workload: str) -> str:
    header: tuple[str, ...] = ("system", "rounds", "range tok/s", "TTFT p50", "p99", "per token p50", "p99 (ms)")
    header += ("accepted", "drafts", "rows/token", "pruned", "of oracle", "modes")
    rows = []
    for system, case in report.select(expand, workload).items():
        rates = summarize(case.rates())
        modes: dict[str, float] = {}
        for item in case.rounds:
            for mode, share in item.modes.items():
                modes[mode] = modes.get(mode, 0.0) + share / len(case.rounds)
        rows.append(
            (
                system,
                str(len(case.rounds)),
                f"{rates.low:.0f} to {rates.high:.0f}",
                *(_number(case.median(name), 1) for name in ("ttft_p50_ms", "ttft_p99_ms")),
                *(_number(case.median(name), 2) for name in ("per_token_p50_ms", "per_token_p99_ms")),
                _number(case.median("acceptance"), 2),
                _number(case.median("draft_len"), 1),
                _number(case.median("rows_per_token"), 2),
                _percent(case.median("share_pruned")),
                _number(case.median("oracle"), 3),
                ", ".join(f"{mode} {100 * share:.0f}%" for mode, share in sorted(modes.items())),
            )
        )
    return f"### x{expand}, {workload}\n\n" + table(header, rows)


def _calibration(report: PolicyBenchReport) -> str:
    rows: list[Sequence[str]] = [
        (f"x{c.expand}", c.system, f"{sum(c.count):.0f}", f"{c.ece:.3f}") for c in report.calibrations
    ]
    if not rows:
        return ""
    return "## Survival estimator\n\n" + table(("form", "system", "predictions", "expected calibration error"), rows)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"
