"""A profile as text."""

from __future__ import annotations

from collections.abc import Iterator

from faser_trtllm.profiling.report import ProfileReport, error_lines


def profile_lines(report: ProfileReport) -> Iterator[str]:
    """Yield what a profile found, in sentences."""
    fingerprint = report.table.fingerprint
    yield (
        f"{fingerprint.cpu_model}, {fingerprint.isa}, {fingerprint.num_threads} threads: "
        f"{len(report.samples)} points, {report.num_rounds} rounds, {report.seconds:.0f} s"
    )
    yield from error_lines(report.table.errors)
    routing = report.table.routing
    if routing is not None:
        yield (
            f"{routing.top_k} of {routing.num_experts} experts, {report.table.per_expert_ms:.4f} ms for each that a "
            f"pass reads; of random tokens, rows of one request share {100 * routing.overlap:.0f}% of theirs, of "
            f"two requests {100 * max(routing.across, routing.chance):.0f}% (by chance {100 * routing.chance:.0f}%)"
        )
    for rows in (1, 8, 64):
        yield f"target, {rows} rows: {report.table.verify_ms(rows, max(1, rows // 4), 256):.2f} ms"
    for requests in (1, 8):
        if report.table.has("draft_step"):
            yield f"draft, one step of {requests} requests: {report.table.draft_step_ms(requests, 256):.3f} ms"
    for pair in report.table.interference:
        yield (
            f"both streams at once (draft on {pair.draft_partition!r}, target on {pair.verify_partition!r}): "
            f"draft x{pair.draft_factor:.2f}, target x{pair.verify_factor:.2f}"
        )
    yield f"a step costs {report.table.overhead_ms:.3f} ms besides its passes"
    for model in report.table.exits:
        verdict = "pays" if model.pays else "does not pay beyond the draft's confidence"
        yield f"pruning at boundary {model.boundary}: {verdict}"
    for q in (q for q in report.exit_quality if q.share > 0):
        yield (
            f"exit at layer {q.layer}, below {q.threshold}: drops {100 * q.share:.1f}% of drafts, "
            f"precision {q.precision:.2f}, recall {q.recall:.2f} "
            f"(confidence alone: {q.baseline_precision:.2f}, {q.baseline_recall:.2f})"
        )
