"""Compare the cost model with measurements on an H100 of 2026-11-26, point by point (data/h100_points.csv).

The pair is the enlarged demo pair on our GPU engine. Times are ms. A point's kind is
- "pass": a target pass with rejection sampling; "probed pass": the same with the probe's host time;
- "products", "attention": parts of a pass, the latter per layer and in us;
- "draft step", "draft call", "step": with the host's time;
- "products there", "draft step there": on sms SMs over the whole GPU;
- "slowdown": of a stream on one side of a split, which takes draft_ms or verify_ms alone, next to the other stream;
- "host": the host's time of a step.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.model.steps import step_ms
from lab.costmodel.gpu import GPUS
from lab.costmodel.pair import Pair
from lab.costmodel.shape import ModelShape
from lab.costmodel.traffic import Work

TARGET = ModelShape("demo target at 8B", 32, 4096, 14336, 32, 8, 128, 4096)
DRAFT = ModelShape("demo draft at 0.3B", 20, 1024, 4096, 16, 4, 64, 4096)
PROBE_MS = 0.45  # host time of a probed pass, which a step counts separately
DRAFT_STEPS = 4  # steps of a draft stream


@dataclass(frozen=True)
class OwnPoint:
    """One measurement. model: "target" or "draft". before: the model's figure before it was fitted to these points.

    Fields that a kind does not need are 0.
    """

    group: str
    kind: str
    model: str
    rows: int
    requests: int
    context: float
    draft_len: int
    sms: int
    draft_ms: float
    verify_ms: float
    measured: float
    before: float

    @property
    def modeled(self) -> float:
        return _KINDS[self.kind](self)

    @property
    def error(self) -> float:
        """The model's error as a share of the measurement."""
        return self.modeled / self.measured - 1.0

    @property
    def error_before(self) -> float:
        return self.before / self.measured - 1.0


def read_own_points() -> list[OwnPoint]:
    text = (Path(__file__).parent / "data/h100_points.csv").read_text()
    return [
        OwnPoint(
            row["group"],
            row["kind"],
            row["model"],
            int(row["rows"] or 0),
            int(row["requests"] or 0),
            float(row["context"] or 0),
            int(row["draft_len"] or 0),
            int(row["sms"] or 0),
            float(row["draft_ms"] or 0),
            float(row["verify_ms"] or 0),
            float(row["measured"]),
            float(row["before"]),
        )
        for row in csv.DictReader(text.splitlines())
    ]


def own_groups(points: Sequence[OwnPoint]) -> dict[str, list[OwnPoint]]:
    groups: dict[str, list[OwnPoint]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    return groups


def _pair(point: OwnPoint) -> Pair:
    """Return the pair, with the measured split if the draft's side is known."""
    return Pair(GPUS["h100"], TARGET, DRAFT, draft_sms=None if point.kind == "products there" else point.sms or None)


def _pass_ms(point: OwnPoint) -> float:
    return _pair(point).verify_ms(point.rows, point.requests, point.context)


def _probed_pass_ms(point: OwnPoint) -> float:
    return _pass_ms(point) + PROBE_MS


def _products_ms(point: OwnPoint) -> float:
    return _pair(point).target.products_ms(point.rows)


def _attention_us(point: OwnPoint) -> float:
    pair = _pair(point)
    model = pair.target if point.model == "target" else pair.draft
    return 1e3 * model.attention_ms(point.requests, point.context) / model.shape.num_layers


def _draft_step_ms(point: OwnPoint) -> float:
    return _pair(point).draft_step_ms(point.requests, point.context)


def _draft_call_ms(point: OwnPoint) -> float:
    return _pair(point).drafting_ms(point.draft_len, point.requests, point.context)


def _step_ms(point: OwnPoint) -> float:
    return step_ms(_pair(point), point.draft_len, point.requests, point.context)


def _products_there(point: OwnPoint) -> float:
    pair = _pair(point)
    model = pair.target if point.model == "target" else pair.draft
    return model.product_ratio(point.rows, point.sms / pair.gpu.num_sms)


def _draft_step_there(point: OwnPoint) -> float:
    pair = _pair(point)
    return pair.draft_step_ms(point.requests, point.context, pair.draft_share) / _draft_step_ms(point)


def _slowdown(point: OwnPoint) -> float:
    pair = _pair(point)
    draft = Work(point.draft_ms, DRAFT_STEPS * pair.draft.shape.pass_gb)
    verify = Work(point.verify_ms, pair.target.shape.pass_gb)
    slowdowns = pair.traffic.slowdowns(draft, "draft", verify, "verify")
    return slowdowns[0] if point.model == "draft" else slowdowns[1]


def _host_ms(point: OwnPoint) -> float:
    return _pair(point).host.step_ms


_KINDS: dict[str, Callable[[OwnPoint], float]] = {
    "pass": _pass_ms,
    "probed pass": _probed_pass_ms,
    "products": _products_ms,
    "attention": _attention_us,
    "draft step": _draft_step_ms,
    "draft call": _draft_call_ms,
    "step": _step_ms,
    "products there": _products_there,
    "draft step there": _draft_step_there,
    "slowdown": _slowdown,
    "host": _host_ms,
}
