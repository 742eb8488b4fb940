"""Results of a profile besides the cost table, as values, JSON and text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from faser_trtllm.core.cost_table import ALL, CostSample, CostTable
from faser_trtllm.profiling.exit_models import ExitQuality

PAPER_ERROR = {"draft_step": 0.17, "verify": 0.075}  # MAPE of the paper's cost models (arXiv 2604.20503)
NAMES = {"draft_step": "draft", "verify": "target", "draft_rows": "draft catch-up"}


@dataclass(frozen=True)
class ProfileReport:
    """samples were fitted, held_out were not; seconds: duration of the whole profile."""

    table: CostTable
    samples: tuple[CostSample, ...]
    held_out: tuple[CostSample, ...]
    exit_quality: tuple[ExitQuality, ...]
    num_exit_observations: int
    num_rounds: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The cost table's JSON with all data it was made from."""
        return self.table.to_json() | {
            "samples": [asdict(s) for s in self.samples],
            "held_out": [asdict(s) | {"predicted_ms": predict(self.table, s)} for s in self.held_out],
            "exit_quality": [asdict(q) for q in self.exit_quality],
            "num_exit_observations": self.num_exit_observations,
            "num_rounds": self.num_rounds,
            "seconds": self.seconds,
        }

    def lines(self) -> Iterator[str]:
        """A summary for people."""
        fingerprint = self.table.fingerprint
        yield (
            f"{fingerprint.cpu_model}, {fingerprint.isa}, {fingerprint.num_threads} threads: "
            f"{len(self.samples)} points, {self.num_rounds} rounds, {self.seconds:.0f} s"
        )
        for kind, error in self.table.held_out_errors.items():
            count = sum(s.kind == kind for s in self.held_out)
            paper = f", the paper states {100 * PAPER_ERROR[kind]:.1f}%" if kind in PAPER_ERROR else ""
            yield f"{NAMES.get(kind, kind)}: MAPE {100 * error:.1f}% on {count} held-out points{paper}"
        for rows in (1, 8, 64):
            yield f"target, {rows} rows: {self.table.verify_ms(rows, max(1, rows // 4), 256):.2f} ms"
        for requests in (1, 8):
            if self.table.has("draft_step"):
                yield f"draft, one step of {requests} requests: {self.table.draft_step_ms(requests, 256):.3f} ms"
        for pair in self.table.interference:
            yield (
                f"both lanes at once (draft on {pair.draft_partition!r}, target on {pair.verify_partition!r}): "
                f"draft x{pair.draft_factor:.2f}, target x{pair.verify_factor:.2f}"
            )
        yield f"a step costs {self.table.overhead_ms:.3f} ms beside its passes"
        for model in self.table.exits:
            verdict = "pays" if model.pays else "does not pay beyond the draft's confidence"
            yield f"pruning at boundary {model.boundary}: {verdict}"
        for q in (q for q in self.exit_quality if q.share > 0):
            yield (
                f"exit at layer {q.layer}, below {q.threshold}: drops {100 * q.share:.1f}% of drafts, "
                f"precision {q.precision:.2f}, recall {q.recall:.2f} "
                f"(confidence alone: {q.baseline_precision:.2f}, {q.baseline_recall:.2f})"
            )


def predict(table: CostTable, sample: CostSample) -> float:
    """ms predicted by the curve of the sample's kind and partition."""
    curve = table.curves[f"{sample.kind}@{sample.partition or ALL}"]
    return curve.at(sample.num_rows, sample.num_requests, sample.context_len)
