"""Section "breakdown": the kernels of a pass by time, at the contexts of the section "steps"."""

from __future__ import annotations

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines.kernel_times import KernelTime, kernel_times
from benchmarks.gpu.engines.steps import CONTEXTS, DRY_CONTEXTS, time_step
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import open_pair
from benchmarks.gpu.models.probe import PairProbe
from faser_trtllm.profiling.grid import Point
from faser_trtllm.profiling.probe import DRAFTED

# (kind, rows, requests)
POINTS = (
    *(("verify", rows * n, n) for n in (1, 32, 128) for rows in (1, 5)),
    *(("draft_step", n, n) for n in (1, 32, 128)),
)
DRY_POINTS = (("verify", 5, 1), ("draft_step", 2, 2))
NUM_RUNS, NUM_TIMED, DRY_NUM_RUNS = 5, 10, 1
MAX_KERNELS = 16
WORDS = {"verify": "target pass", "draft_step": "draft call of {} steps"}


def run(bench: Bench) -> None:
    dry, form = bench.is_dry, bench.options.forms[0]
    points, contexts = (DRY_POINTS, DRY_CONTEXTS) if dry else (POINTS, CONTEXTS)
    largest, rows = max(n for _, _, n in points), max(rows for _, rows, _ in points)
    limits = PairLimits(largest, max(contexts) + 32, max(64 if dry else 1024, rows))
    with open_pair(bench, form, limits) as pair:
        bench.record.value("described", pair.describe())
        probe = PairProbe(pair, max(contexts))
        probe.fill()
        for point in points:
            bench.record.attempt(
                " ".join(map(str, point)),
                lambda point=point: _point(bench, form, probe, point, contexts),  # type: ignore[misc]
            )


def _point(bench: Bench, form: str, probe: PairProbe, point: tuple[str, int, int], contexts: tuple[int, ...]) -> None:
    kind, rows, requests = point
    # A draft call is run whole and timed by the step.
    num_steps = min(DRAFTED, probe.limits.max_draft_len) if kind == "draft_step" else 1
    times: dict[int, dict[str, KernelTime]] = {}
    wall, wall_ms = [], {}
    for context in contexts:
        work = probe.runner(Point(kind, "all", rows, requests, context))
        alone_ms = num_steps * time_step(work, DRY_NUM_RUNS if bench.is_dry else NUM_TIMED)
        kernels, profiled_ms = kernel_times(bench.machine, work, DRY_NUM_RUNS if bench.is_dry else NUM_RUNS)
        wall_ms[str(context)] = alone_ms / num_steps
        times[context] = {kernel.name: kernel for kernel in kernels}
        wall.append(f"{alone_ms:.3f} ms at {context} ({profiled_ms:.3f} profiled)")
    names = sorted(
        dict.fromkeys(name for found in times.values() for name in found),
        key=lambda name: -max(found[name].us for found in times.values() if name in found),
    )
    rest = names[MAX_KERNELS:]
    cells: list[tuple[object, ...]] = [
        (name, f"{next(f[name].launches for f in times.values() if name in f):.1f}", *_us(times, [name]))
        for name in names[:MAX_KERNELS]
    ]
    cells += [(f"{len(rest)} others", "", *_us(times, rest))] if rest else []
    bench.record.table(
        f"{form}: {WORDS[kind].format(num_steps)}, {rows} rows of {requests} requests",
        ("kernel", "launches", *(f"us at {context}" for context in contexts)),
        [*cells, ("all", "", *_us(times, names))],
        f"By tokens of context. Wall time: {', '.join(wall)}. The rest of it is gaps and the host.",
    )
    sums = {str(context): sum(kernel.us for kernel in found.values()) for context, found in times.items()}
    bench.record.value(f"us of kernels, {kind} {rows} {requests}", sums)
    bench.record.value(f"wall ms, {kind} {rows} {requests}", wall_ms)


def _us(times: dict[int, dict[str, KernelTime]], names: list[str]) -> list[str]:
    return [f"{sum(found[name].us for name in names if name in found):.0f}" for found in times.values()]
