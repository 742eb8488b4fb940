"""Section "costs": the cost table of a pair, for policies (core/cost_table.py)."""

from __future__ import annotations

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines.calibration import calibrated
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import OpenPair, Pair, open_pair
from benchmarks.gpu.models.probe import PairProbe
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.curve_error import MAX_ERROR
from faser_trtllm.errors import ConfigError
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.profile import measure_passes

CONTEXT, DRY_CONTEXT = 256, 16
SECONDS_PER_FORM = 30.0


def run(bench: Bench) -> None:
    for form in bench.forms(SECONDS_PER_FORM):
        bench.record.attempt(form, lambda form=form: _form(bench, form))  # type: ignore[misc]


def _form(bench: Bench, form: str) -> None:
    largest = 2 if bench.is_dry else max(bench.options.concurrency)
    context = DRY_CONTEXT if bench.is_dry else CONTEXT
    limits = PairLimits(largest, context + 64, max(5 * largest, 64 if bench.is_dry else 1024))
    with open_pair(bench, form, limits, overlap=True) as pair:
        table = measure_table(bench, pair, context)
        table.save(bench.file(cost_file(form)))
        whole = bench.record.attempt(f"{form}, exits", lambda: calibrated(bench, pair, table))
    if whole is not None:
        whole.save(bench.file(cost_file(form)))
    for kind, curve in (("verify", table.curves["verify@all"]), ("draft step", table.curves["draft_step@all"])):
        bench.record.table(
            f"{form}, {kind}",
            ("rows", "ms"),
            [(rows, f"{ms:.3f}") for rows, ms in zip(curve.rows, curve.ms, strict=True)],
            f"And {1e3 * curve.per_request_ms:.2f} us per request, {1e6 * curve.per_request_context_ms:.2f} ns per "
            "request and token of context.",
        )
    for both in table.interference:
        bench.record.table(
            f"{form}, both streams at once",
            ("draft on", "verify on", "draft time over alone", "verify time over alone"),
            [
                (
                    both.draft_partition,
                    both.verify_partition,
                    f"{both.draft_factor:.2f}",
                    f"{both.verify_factor:.2f}",
                )
            ],
        )
    judge(bench, form, table)
    points = {
        label: dict(zip(curve.rows, curve.ms, strict=True))
        for label, curve in (("verify", table.curves["verify@all"]), ("draft step", table.curves["draft_step@all"]))
    }
    bench.record.plot(
        f"{form}: ms by rows", "rows", "ms", {k: {float(n): t for n, t in p.items()} for k, p in points.items()}
    )


def judge(bench: Bench, form: str, table: CostTable) -> None:
    """Record each curve's fit. A bad fit is an error, except in a dry run, whose times are meaningless."""

    def percent(share: float | None) -> str | None:
        return None if share is None else f"{100 * share:.1f}%"

    errors = sorted(table.errors.items())
    bench.record.table(
        f"{form}: errors of the curves",
        ("curve", "on what was fitted", "held out", "refitted", "left out"),
        [(key, percent(e.in_sample), percent(e.held_out), e.refitted, e.left_out) for key, e in errors],
        "Mean absolute relative errors. refitted: without slopes; left out: another curve stands for it.",
    )
    bench.record.value(f"error {form}", {key: [error.in_sample, error.held_out] for key, error in errors})
    for key, error in () if bench.is_dry else errors:
        if error.worst > MAX_ERROR:
            off, most = (f"{100 * share:.0f} %" for share in (error.worst, MAX_ERROR))
            bench.record.error(f"{form}, {key} is off by {off}, more than {most}")
        elif error.left_out:
            bench.record.error(f"{form}, {key} costs more than such passes do, and is left out")


def cost_file(form: str) -> str:
    return f"cost_table_{form}.json"


def measure_table(bench: Bench, pair: OpenPair, context_len: int) -> CostTable:
    """Measure a table like a quick `faser profile`, with both sides of the split."""
    options = ProfileOptions(bench.options.output_dir, quick=True, overlap=True, seed=bench.options.seed)
    passes = measure_passes(PairProbe(pair, context_len), options)
    return passes.table(bench.machine.fingerprint(pair.made_of))


def table_of(bench: Bench, pair: Pair, context_len: int) -> CostTable:
    """Return this section's table for the pair if it is for this GPU, or measure one."""
    path = bench.file(cost_file(pair.name))
    if path.exists():
        try:
            return CostTable.load(path, bench.machine.fingerprint(pair.made_of))
        except ConfigError as error:
            bench.record.value(f"table of {pair.name} measured again", str(error))
    return measure_table(bench, pair, context_len)
