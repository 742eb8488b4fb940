"""Compare the cost model with public measurements, point by point (data/points.csv).

Times are ms. A point's kind is "tpot", the mean time per token in steady load with prompts; "pass"; "speed-up" of a
draft length over none; "relative speed-up" over that of one request; "drafting share" of a step; or "step per token", a
step over its tokens.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from lab.costmodel.gpu import find_gpu
from lab.costmodel.passes import PassModel
from lab.costmodel.shape import find_shape

EAGLE, EAGLE3 = "eagle", "eagle3"  # heads of one layer; the first shares the target's LM head
SOURCES = {
    "AIC": "end-to-end points in aiconfigurator-core 0.12.0 (silicon_sample.csv, Apache-2.0)",
    "AIC tables": "sums of the measured operators in aiconfigurator-core 0.12.0",
    "SDB": "SpecDecode-Bench, arXiv 2601.11580, its linear fit of passes and its figures 1 and 4, read off",
    "V20780": "vLLM issue 20780",
    "SGL": "SGLang's documentation, 158 tokens/s",
    "SF339": "SpecForge issue 339",
}


@dataclass(frozen=True)
class Point:
    """One measurement. Fields that a kind does not need are 0 or empty."""

    group: str
    gpu: str
    target: str
    num_gpus: int
    is_fp8: bool
    draft: str
    kind: str
    rows: int
    requests: int
    context: float
    prompt_len: int
    output_len: int
    draft_len: int
    tokens_per_step: float
    host_ms: float
    draft_host_ms: float
    measured: float
    source: str

    @property
    def what(self) -> str:
        """Description of the point within its group."""
        words = [self.target] if self.source == "AIC tables" else []
        words += [f"{self.rows} rows"] if self.rows and self.rows != self.requests else []
        words += [f"batch {self.requests}"]
        words += [f"{self.prompt_len} in, {self.output_len} out"] if self.output_len else []
        words += [f"context {self.context:g}"] if self.context else []
        words += [f"k={self.draft_len}"] if self.draft_len else []
        return ", ".join(words)


@dataclass(frozen=True)
class Comparison:
    point: Point
    modeled: float

    @property
    def error(self) -> float:
        """The model's error as a share of the measurement."""
        return self.modeled / self.point.measured - 1.0


def compare_all() -> list[Comparison]:
    """Return every point with the model's figure."""
    return [Comparison(point, _KINDS[point.kind](point)) for point in read_points()]


def read_points() -> list[Point]:
    text = (Path(__file__).parent / "data/points.csv").read_text()

    def number(text: str) -> float:
        return float(text or 0)

    return [
        Point(
            row["group"],
            row["gpu"],
            row["target"],
            int(row["num_gpus"]),
            row["fp8"] == "1",
            row["draft"],
            row["kind"],
            int(number(row["rows"])),
            int(number(row["requests"])),
            number(row["context"]),
            int(number(row["prompt_len"])),
            int(number(row["output_len"])),
            int(number(row["draft_len"])),
            number(row["tokens_per_step"]),
            number(row["host_ms"]),
            number(row["draft_host_ms"]),
            float(row["measured"]),
            row["source"],
        )
        for row in csv.DictReader(text.splitlines())
    ]


def mean_error(comparisons: Sequence[Comparison]) -> float:
    return fmean(abs(c.error) for c in comparisons)


def by_group(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    groups: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault(comparison.point.group, []).append(comparison)
    return groups


def _target(point: Point) -> PassModel:
    shape = find_shape(point.target).on(point.num_gpus)
    return PassModel(find_gpu(point.gpu), shape.in_fp8() if point.is_fp8 else shape, is_ours=False)


def _tpot_ms(point: Point) -> float:
    """Return the time per token, with the waits for the prompts of other requests spread over the output."""
    target, b = _target(point), point.requests
    decode_ms = target.ms(b, b, point.prompt_len + point.output_len / 2)
    return decode_ms + (b - 1) / point.output_len * target.prompt_ms(point.prompt_len)


def _pass_ms(point: Point) -> float:
    return _target(point).ms(point.rows, point.requests, point.context)


def _drafting_ms(point: Point, requests: int) -> float:
    """Return the time of point.draft_len steps, including the host's."""
    gpu, target = find_gpu(point.gpu), find_shape(point.target)
    if point.draft in (EAGLE, EAGLE3):
        head = PassModel(gpu, target.eagle3(), is_ours=False)
        step_ms = head.ms(requests, requests, point.context, has_head=point.draft == EAGLE3)
        if point.draft == EAGLE:
            step_ms += PassModel(gpu, target, is_ours=False).head_ms(requests)
    else:
        step_ms = PassModel(gpu, find_shape(point.draft), is_ours=False).ms(requests, requests, point.context)
    return point.draft_len * (step_ms + point.draft_host_ms)


def _step_ms(point: Point, requests: int) -> float:
    rows = requests * (1 + point.draft_len)
    drafting_ms = _drafting_ms(point, requests) if point.draft_len else 0.0
    return drafting_ms + _target(point).ms(rows, requests, point.context) + point.host_ms


def _off_ms(point: Point, requests: int) -> float:
    return _target(point).ms(requests, requests, point.context) + point.host_ms


def _speed_up(point: Point) -> float:
    return point.tokens_per_step * _off_ms(point, point.requests) / _step_ms(point, point.requests)


def _relative_speed_up(point: Point) -> float:
    one = _off_ms(point, 1) / _step_ms(point, 1)
    return _off_ms(point, point.requests) / _step_ms(point, point.requests) / one


def _drafting_share(point: Point) -> float:
    return _drafting_ms(point, point.requests) / _step_ms(point, point.requests)


def _step_per_token_ms(point: Point) -> float:
    return _step_ms(point, point.requests) / point.tokens_per_step


_KINDS: dict[str, Callable[[Point], float]] = {
    "tpot": _tpot_ms,
    "pass": _pass_ms,
    "speed-up": _speed_up,
    "relative speed-up": _relative_speed_up,
    "drafting share": _drafting_share,
    "step per token": _step_per_token_ms,
}
