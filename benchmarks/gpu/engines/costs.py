"""Section "costs": the cost table of a pair, for policies (core/cost_table.py)."""

from __future__ import annotations

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines.calibration import calibrated
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import OpenPair, open_pair
from benchmarks.gpu.models.probe import PairProbe
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.profile import measure_passes

CONTEXT, DRY_CONTEXT = 256, 16
SECONDS_PER_FORM = 30.0


def run(bench: Bench) -> None:
    for form in bench.options.forms[:1] if bench.is_dry else bench.options.forms:
        if bench.left_s < SECONDS_PER_FORM and not bench.is_dry:
            bench.record.error(f"the time was over before {form}")
            return
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
    for beside in table.interference:
        bench.record.table(
            f"{form}, both lanes at once",
            ("draft on", "verify on", "draft time over alone", "verify time over alone"),
            [
                (
                    beside.draft_partition,
                    beside.verify_partition,
                    f"{beside.draft_factor:.2f}",
                    f"{beside.verify_factor:.2f}",
                )
            ],
        )
    error = {kind: round(value, 4) for kind, value in table.held_out_errors.items()}
    bench.record.value(f"error {form}", error)
    points = {
        label: dict(zip(curve.rows, curve.ms, strict=True))
        for label, curve in (("verify", table.curves["verify@all"]), ("draft step", table.curves["draft_step@all"]))
    }
    bench.record.plot(
        f"{form}: ms by rows", "rows", "ms", {k: {float(n): t for n, t in p.items()} for k, p in points.items()}
    )


def cost_file(form: str) -> str:
    """The table's file in the output folder."""
    return f"cost_table_{form}.json"


def measure_table(bench: Bench, pair: OpenPair, context_len: int) -> CostTable:
    """What policies go by, as a quick `faser profile` measures it, with both sides of the split."""
    options = ProfileOptions(bench.options.output_dir, quick=True, lanes=True, seed=bench.options.seed)
    passes = measure_passes(PairProbe(pair, context_len), options)
    return passes.table(bench.machine.fingerprint(pair.made_of))
