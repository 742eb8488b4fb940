"""A pair's cost table in the form of `faser profile`, with modeled instead of measured times."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from faser_trtllm.core.cost_curve import ALL, CostCurve, CostSample
from faser_trtllm.core.cost_table import MODELED, CostTable, CurveError, ExitModel, Fingerprint, Interference
from faser_trtllm.engine.buckets import MAX_GRAPH_ROWS, Buckets
from lab.costmodel.accuracy import error_by_kind
from lab.costmodel.anchors import anchors_version
from lab.costmodel.pair import Pair
from lab.costmodel.traffic import Work

CONTEXTS = (256, 1024, 4096)
LARGE_ROWS = (320, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
REQUEST_SHARES = (0.125, 0.25, 0.5, 1.0)  # requests as shares of the rows
USUAL_REQUESTS, USUAL_LENGTH = 64, 4  # the step whose slowdowns policies use for all steps


@dataclass(frozen=True)
class ExitSignal:
    """An assumed early exit, which doubts the share `recall` of drafts that will be rejected, and `false` of others.
    depth: share of the layers before it."""

    depth: float = 0.25
    recall: float = 0.4
    false: float = 0.03

    def model(self, boundary: int) -> ExitModel:
        """Return the model by Bayes' rule, where rank 0 is no doubt and rank 1 is doubt."""
        calm = math.log((1.0 - self.false) / (1.0 - self.recall))
        doubt = math.log(self.false / self.recall)
        return ExitModel(boundary, rank=doubt - calm, gap=0.0, survival=1.0, intercept=calm, pays=True)


def modeled_table(
    pair: Pair,
    *,
    max_batch_size: int = 256,
    contexts: Sequence[int] = CONTEXTS,
    exit_signal: ExitSignal | None = None,
) -> CostTable:
    """Return a pair's table. contexts: for which attention is fitted. exit_signal: adds a boundary with pruning."""
    targets, drafts = list(_grid(max_batch_size, contexts)), list(_grid(max_batch_size, contexts))
    steps = [(n, n, c) for n in _rows() if n <= max_batch_size for c in contexts]
    verify_share, draft_share = 1.0 - pair.draft_share, pair.draft_share
    first = "draft_block" if pair.draft.shape.block_size else "draft_rows"
    experts = pair.target.distinct_experts
    samples = [
        *_samples("verify", targets, pair.verify_ms, experts=experts),
        *_samples("verify", targets, lambda n, b, c: pair.verify_ms(n, b, c, verify_share), "verify", experts),
        *_samples("draft_step", steps, lambda n, b, c: pair.draft_step_ms(b, c)),
        *_samples("draft_step", steps, lambda n, b, c: pair.draft_step_ms(b, c, draft_share), "draft"),
        *_samples(first, drafts, pair.draft_rows_ms),
        *_samples(first, drafts, lambda n, b, c: pair.draft_rows_ms(n, b, c, draft_share), "draft"),
    ]
    target, draft = pair.target.shape, pair.draft.shape
    if exit_signal is not None:
        depth = exit_signal.depth
        for kind, share, is_last in (("segment:0", depth, False), ("segment:1", 1.0 - depth, True)):
            ms = functools.partial(_segment_ms, pair, layer_share=share, is_last=is_last)
            samples += _samples(kind, targets, ms, experts=experts)
    table = CostTable.fit(
        samples,
        Fingerprint(
            f"modeled {target.num_gpus} x {pair.gpu.name}", "cuda", pair.gpu.num_sms, f"{target.name} + {draft.name}"
        ),
        interference=[_usual_interference(pair)],
        exits=[] if exit_signal is None else [exit_signal.model(1)],
        overhead_ms=pair.host.step_ms,
        routing=None if target.experts is None else target.experts.routing,
    )
    curves = dict(table.curves)
    if exit_signal is not None:
        host, most = pair.host, LARGE_ROWS[-1]
        ends = tuple(host.boundary_ms + host.score_row_ms * n for n in (1, most))
        curves[f"exit:1@{ALL}"] = CostCurve((1, most), ends)
    return replace(
        table,
        curves=curves,
        errors=_errors(pair, table),
        source=MODELED,
        anchors=anchors_version(),
        traffic=asdict(pair.traffic),
    )


def _errors(pair: Pair, table: CostTable) -> dict[str, CurveError]:
    """Return errors of the fit to the model, with the model's own errors."""
    is_mixture = pair.target.shape.experts is not None
    by_kind = error_by_kind(pair.gpu.name, is_mixture=is_mixture)
    public = {f"{kind}@{ALL}": error for kind, error in by_kind.items()}
    return {
        key: replace(table.errors.get(key, CurveError()), held_out=public.get(key))
        for key in dict.fromkeys((*table.errors, *public))
    }


def _rows() -> list[int]:
    """Return row counts on both sides of each bucket's edge, and of larger passes."""
    sizes = Buckets(MAX_GRAPH_ROWS).sizes()
    return sorted({*sizes, *(size + 1 for size in sizes), *LARGE_ROWS})


def _grid(max_requests: int, contexts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for rows in _rows():
        for requests in sorted({min(max_requests, max(1, round(share * rows))) for share in (0.0, *REQUEST_SHARES)}):
            for context in contexts:
                yield rows, requests, context


def _samples(
    kind: str,
    points: Sequence[tuple[int, int, int]],
    ms: Callable[[float, float, float], float],
    partition: str = ALL,
    experts: Callable[[float, float], float] = lambda num_rows, num_requests: 0.0,
) -> list[CostSample]:
    return [CostSample(kind, n, b, c, ms(n, b, c), partition, experts(n, b)) for n, b, c in points]


def _segment_ms(
    pair: Pair, num_rows: float, num_requests: float, context_len: float, *, layer_share: float, is_last: bool
) -> float:
    ms = pair.target.ms(num_rows, num_requests, context_len, layer_share=layer_share, has_head=is_last)
    return ms + (pair.host.test_row_ms * num_rows if is_last else 0.0)


def _usual_interference(pair: Pair) -> Interference:
    """Return slowdowns of a usual step for policies, which use one pair of factors; simulated time uses traffic."""
    n, length, context = USUAL_REQUESTS / 2, USUAL_LENGTH, CONTEXTS[1]
    draft_ms = pair.drafting_ms(length, n, context, pair.draft_share)
    verify_ms = pair.verify_ms(n * (1 + length), n, context, 1.0 - pair.draft_share)
    draft = Work(draft_ms, pair.drafting_gb(length, n, context))
    verify = Work(verify_ms, pair.target.pass_gb(n, context))
    slowdowns = pair.traffic.slowdowns(draft, "draft", verify, "verify")
    return Interference("draft", "verify", *slowdowns)
