"""What a pass costs on this machine with these engines: measured cells, kept as a staircase over rows.

Each curve is T(rows, requests, context) = stairs(rows) + per_request * requests + per_row_context * rows * context
+ per_request_context * requests * context (a request's cache is read once for all its rows), in ms: an additive model
whose stairs are measured at chosen row counts, kept non-decreasing, joined by straight lines
(the kernels' tiles of 16 rows are steps with a slope, so the row counts around a tile's edge are measured) and
continued with the last slope. Context is the mean number of tokens that a row attends to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import ConfigError

FORMAT = 1
ALL = "all"  # the partition with every core; others: "verify" and "draft", the lanes of an overlapped step
CONTEXT_BUCKET = 16  # tokens
CACHE_SIZE = 2048

FloatArray = npt.NDArray[np.float64]


def context_bucket(context_len: float) -> int:
    """Which multiple of CONTEXT_BUCKET is nearest."""
    return max(0, round(context_len / CONTEXT_BUCKET))


@dataclass(frozen=True)
class Fingerprint:
    """What a table is valid for."""

    cpu_model: str
    isa: str
    num_threads: int
    engine: str  # hash of the engine directory's manifest


@dataclass(frozen=True)
class CostSample:
    """One measured point: the median of several runs.

    kind: "verify" (a target pass), "decode" (one without drafting before it), "draft_step" (one autoregressive step,
    num_rows == num_requests), "draft_rows" (the draft model's catch-up rows), "segment:I" (segment I of the target, 0
    is the first), "exit:I" (candidate scores at boundary I).
    """

    kind: str
    num_rows: int
    num_requests: int
    context_len: int
    ms: float
    partition: str = ALL


@dataclass(frozen=True)
class CostCurve:
    """rows (ascending) and ms of the stairs; ms per request, per row and per request and token of context."""

    rows: tuple[int, ...]
    ms: tuple[float, ...]
    per_request_ms: float = 0.0
    per_row_context_ms: float = 0.0
    per_request_context_ms: float = 0.0

    def at(self, num_rows: float, num_requests: float, context_len: float) -> float:
        rows, ms = self.rows, self.ms
        if num_rows > rows[-1] and len(rows) > 1:
            base = ms[-1] + (num_rows - rows[-1]) * self.tail_slope
        else:
            base = float(np.interp(num_rows, rows, ms))
        by_request = (self.per_request_ms + self.per_request_context_ms * context_len) * num_requests
        return base + by_request + self.per_row_context_ms * num_rows * context_len

    @property
    def tail_slope(self) -> float:
        """ms per row behind the last cell: over the last half of the measured range, not over one step."""
        first = int(np.searchsorted(self.rows, self.rows[-1] / 2))
        first = min(first, len(self.rows) - 2)
        return (self.ms[-1] - self.ms[first]) / (self.rows[-1] - self.rows[first])

    def over_rows(self, max_rows: int, num_requests: float, context_len: float) -> FloatArray:
        """ms [max_rows + 1] for 0, 1, ..., max_rows rows; no rows cost nothing."""
        n = np.arange(max_rows + 1, dtype=np.float64)
        base = np.interp(n, self.rows, self.ms)
        if len(self.rows) > 1:
            base += np.maximum(n - self.rows[-1], 0.0) * self.tail_slope
        base += (self.per_request_ms + self.per_request_context_ms * context_len) * num_requests
        base += self.per_row_context_ms * context_len * n
        base[0] = 0.0
        return base


@dataclass(frozen=True)
class ExitModel:
    """Early exit at a boundary, calibrated by `faser profile`.

    Log-odds that a draft passes its test: rank * min(place, 8) + gap * score gap + survival * logit(estimate before the
    pass) + intercept. pays: whether dropping rows here was measured to be faster on the profile's prompts.
    """

    boundary: int
    rank: float
    gap: float
    survival: float
    intercept: float
    pays: bool = False


@dataclass(frozen=True)
class Interference:
    """Time with both lanes busy over time alone, for a pair of partitions."""

    draft_partition: str
    verify_partition: str
    draft_factor: float
    verify_factor: float


@dataclass(frozen=True)
class CostTable:
    """curves: by "kind@partition". error: mean absolute percentage error (as a share) by kind, on held-out samples."""

    fingerprint: Fingerprint
    curves: Mapping[str, CostCurve]
    interference: tuple[Interference, ...] = ()
    exits: tuple[ExitModel, ...] = ()
    overhead_ms: float = 0.0  # of a step, beyond drafting and the pass
    error: Mapping[str, float] = field(default_factory=dict)
    _cache: dict[tuple[str, int, int], FloatArray] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def fit(
        samples: Sequence[CostSample],
        fingerprint: Fingerprint,
        *,
        held_out: Sequence[CostSample] = (),
        interference: Iterable[Interference] = (),
        exits: Iterable[ExitModel] = (),
        overhead_ms: float = 0.0,
    ) -> CostTable:
        """Fit every curve that has samples; "verify" and "draft_step" on the partition "all" are required.

        held_out samples are never fitted; the error by kind is taken on them.
        """
        groups: dict[str, list[CostSample]] = {}
        for sample in samples:
            groups.setdefault(f"{sample.kind}@{sample.partition}", []).append(sample)
        for kind in ("verify", "draft_step"):
            if f"{kind}@{ALL}" not in groups:
                raise ValueError(f"no samples of {kind} on the partition {ALL!r}")
        curves = {key: _fit_curve(group) for key, group in groups.items()}
        error: dict[str, float] = {}
        for kind in sorted({sample.kind for sample in held_out}):
            shares = [
                abs(curves[key].at(s.num_rows, s.num_requests, s.context_len) - s.ms) / s.ms
                for s in held_out
                if s.kind == kind and (key := f"{s.kind}@{s.partition}") in curves
            ]
            if shares:
                error[kind] = float(np.mean(shares))
        return CostTable(fingerprint, curves, tuple(interference), tuple(exits), overhead_ms, error)

    @property
    def partitions(self) -> tuple[str, ...]:
        """Partitions on which a target pass was measured."""
        return tuple(sorted(key.partition("@")[2] for key in self.curves if key.startswith("verify@")))

    def has(self, kind: str, partition: str = ALL) -> bool:
        return f"{kind}@{partition}" in self.curves

    def verify_ms(self, num_rows: int, num_requests: int, context_len: float, partition: str = ALL) -> float:
        """A target pass over num_rows rows of num_requests requests."""
        return self._curve("verify", partition).at(num_rows, num_requests, context_len)

    def decode_ms(self, num_requests: int, context_len: float) -> float:
        """A target pass of one row per request where nothing is drafted between passes, so that the target's weights
        are still in the caches; as any other pass where that was not measured."""
        kind = "decode" if self.has("decode") else "verify"
        return self._curve(kind, ALL).at(num_requests, num_requests, context_len)

    def draft_step_ms(self, num_requests: int, context_len: float, partition: str = ALL) -> float:
        """One autoregressive step of the draft model."""
        return self._curve("draft_step", partition).at(num_requests, num_requests, context_len)

    def draft_rows_ms(self, num_rows: int, num_requests: int, context_len: float, partition: str = ALL) -> float:
        """The draft model's pass over committed tokens that it has not seen; a draft step's time if not measured."""
        kind = "draft_rows" if self.has("draft_rows", partition) else "draft_step"
        return self._curve(kind, partition).at(num_rows, num_requests, context_len)

    def verify_ms_array(self, max_rows: int, num_requests: int, context_len: float, partition: str = ALL) -> FloatArray:
        """verify_ms for 0 to at least max_rows rows; cached, read-only, context rounded to CONTEXT_BUCKET."""
        return self._array("verify", max_rows, num_requests, context_len, partition)

    def draft_step_ms_array(self, max_requests: int, context_len: float, partition: str = ALL) -> FloatArray:
        """draft_step_ms for 0 to at least max_requests requests; cached and read-only like verify_ms_array."""
        return self._array("draft_step", max_requests, 0, context_len, partition)

    def draft_first_ms_array(
        self, max_requests: int, rows_per_request: float, context_len: float, partition: str = ALL
    ) -> FloatArray:
        """The first step of a draft call of 0 to max_requests requests, with what each has committed since its last:
        rows_per_request tokens, 1 to 2 where drafting goes on."""
        if not self.has("draft_rows", partition):
            return self.draft_step_ms_array(max_requests, context_len, partition)[: max_requests + 1]
        curve = self._curve("draft_rows", partition)
        n = np.arange(max_requests + 1, dtype=np.float64)
        rows = rows_per_request * n
        by_rows = self._array("draft_rows", int(rows[-1]) + 1, 0, context_len, partition)
        found: FloatArray = np.interp(rows, np.arange(by_rows.size), by_rows)
        return found + (curve.per_request_ms + curve.per_request_context_ms * context_len) * n

    def remaining_ms_array(self, boundary: int, max_rows: int, num_requests: int, context_len: float) -> FloatArray:
        """ms of the segments from boundary (an index into EngineSpec.segments) on, for 0 to at least max_rows rows."""
        kinds = [f"segment:{i}" for i in range(boundary, self.num_segments)]
        arrays = [self._array(kind, max_rows, num_requests, context_len, ALL)[: max_rows + 1] for kind in kinds]
        return np.sum(arrays, axis=0)  # type: ignore[no-any-return]

    def segment_ms(self, segment: int, num_rows: int, num_requests: int, context_len: float) -> float:
        """One segment of the target (0 is the first) on the partition "all"."""
        return self._curve(f"segment:{segment}", ALL).at(num_rows, num_requests, context_len)

    def exit_ms(self, boundary: int, num_rows: int) -> float:
        """Scoring the candidates of num_rows rows at a boundary; 0 if not measured."""
        curve = self.curves.get(f"exit:{boundary}@{ALL}")
        return curve.at(num_rows, 0, 0) if curve is not None else 0.0

    @property
    def num_segments(self) -> int:
        """Segments measured one by one; 0 without exit layers."""
        return sum(1 for key in self.curves if key.startswith("segment:") and key.endswith(f"@{ALL}"))

    def exit_model(self, boundary: int) -> ExitModel | None:
        return next((model for model in self.exits if model.boundary == boundary), None)

    def interference_of(self, draft_partition: str, verify_partition: str) -> Interference | None:
        """None if this pair of partitions was not measured together."""
        pair = (draft_partition, verify_partition)
        return next((i for i in self.interference if (i.draft_partition, i.verify_partition) == pair), None)

    def to_json(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "fingerprint": asdict(self.fingerprint),
            "curves": {key: asdict(curve) for key, curve in self.curves.items()},
            "interference": [asdict(i) for i in self.interference],
            "exits": [asdict(e) for e in self.exits],
            "overhead_ms": self.overhead_ms,
            "error": dict(self.error),
        }

    @staticmethod
    def from_json(data: Mapping[str, object]) -> CostTable:
        """The inverse of to_json; ConfigError if it is not one. Keys beside the table's own are ignored."""
        try:
            if data["format"] != FORMAT:
                raise ConfigError(
                    f"the cost table has format {data['format']}, but {FORMAT} is needed; run `faser profile` again"
                )
            curves = {
                str(key): CostCurve(
                    tuple(int(n) for n in curve["rows"]),
                    tuple(float(t) for t in curve["ms"]),
                    float(curve["per_request_ms"]),
                    float(curve["per_row_context_ms"]),
                    float(curve.get("per_request_context_ms", 0.0)),
                )
                for key, curve in data["curves"].items()  # type: ignore[attr-defined]
            }
            return CostTable(
                Fingerprint(**data["fingerprint"]),  # type: ignore[arg-type]
                curves,
                tuple(Interference(**i) for i in data["interference"]),  # type: ignore[attr-defined]
                tuple(ExitModel(**e) for e in data["exits"]),  # type: ignore[attr-defined]
                float(data["overhead_ms"]),  # type: ignore[arg-type]
                dict(data["error"]),  # type: ignore[call-overload]
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"the cost table lacks or garbles {error}; run `faser profile` again") from error

    def save(self, path: Path) -> None:
        """Written beside, then renamed: a reader sees the old table or the new one."""
        staged = path.with_name(path.name + ".tmp")
        staged.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        staged.replace(path)

    @staticmethod
    def load(path: Path, fingerprint: Fingerprint) -> CostTable:
        """Read a table for this machine and engine; ConfigError names what differs."""
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"the cost table {path.name} cannot be read ({error}); run `faser profile`") from error
        if not isinstance(data, dict):
            raise ConfigError(f"the cost table {path.name} is not a JSON object; run `faser profile` again")
        table = CostTable.from_json(data)
        here, there = asdict(fingerprint), asdict(table.fingerprint)
        differs = [
            f"{name} is {there[name]!r} there and {here[name]!r} here" for name in here if here[name] != there[name]
        ]
        if differs:
            raise ConfigError(
                f"the cost table {path.name} was measured elsewhere: {', '.join(differs)}; run `faser profile` again"
            )
        return table

    def _curve(self, kind: str, partition: str) -> CostCurve:
        try:
            return self.curves[f"{kind}@{partition}"]
        except KeyError:
            raise ValueError(f"no {kind} was measured on the partition {partition!r}") from None

    def _array(self, kind: str, max_rows: int, num_requests: int, context_len: float, partition: str) -> FloatArray:
        bucket = context_bucket(context_len)
        key = (f"{kind}@{partition}", num_requests, bucket)
        array = self._cache.get(key)
        if array is None or array.size <= max_rows:
            if len(self._cache) >= CACHE_SIZE:
                self._cache.clear()
            curve = self._curve(kind, partition)
            size = max(max_rows, 64)
            context = bucket * CONTEXT_BUCKET
            if kind == "draft_step":  # a row per request
                array = curve.over_rows(size, 0, context)
                array[1:] += curve.per_request_ms * np.arange(1, size + 1)
            else:
                array = curve.over_rows(size, num_requests, context)
            array.setflags(write=False)
            self._cache[key] = array
        return array


def _fit_curve(samples: Sequence[CostSample]) -> CostCurve:
    """Least squares of relative errors: one unknown per row count, and the two slopes where they can be told apart."""
    rows = sorted({s.num_rows for s in samples})
    slopes = _slopes(samples, rows)
    residuals: dict[int, list[float]] = {n: [] for n in rows}
    for s in samples:
        residuals[s.num_rows].append(s.ms - sum(w * x for w, x in zip(slopes, _extras(s), strict=True)))
    stairs = _isotonic([max(0.0, float(np.median(residuals[n]))) for n in rows], [len(residuals[n]) for n in rows])
    return CostCurve(tuple(rows), tuple(stairs), *slopes)


def _extras(s: CostSample) -> tuple[int, int, int]:
    """What the slopes multiply: requests, rows x context, requests x context."""
    return s.num_requests, s.num_rows * s.context_len, s.num_requests * s.context_len


def _isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest non-decreasing sequence by weighted squares (pool adjacent violators); noise averages out, where a
    running maximum would keep its peaks."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        pool = (value, float(weight), 1)
        while pools and pools[-1][0] > pool[0]:
            mean, w, n = pools.pop()
            pool = ((mean * w + pool[0] * pool[1]) / (w + pool[1]), w + pool[1], n + pool[2])
        pools.append(pool)
    return [mean for mean, _, n in pools for _ in range(n)]


def _slopes(samples: Sequence[CostSample], rows: Sequence[int]) -> tuple[float, float, float]:
    index = {n: i for i, n in enumerate(rows)}
    one_per_row = all(s.num_requests == s.num_rows for s in samples)  # then requests and rows are one thing
    by_requests, by_context = not one_per_row and _varies(samples, "num_requests"), _varies(samples, "context_len")
    columns = [by_requests, by_context, by_requests and by_context]
    while any(columns):
        design = np.zeros((len(samples), len(rows) + sum(columns)))
        for i, s in enumerate(samples):
            design[i, index[s.num_rows]] = 1.0
            extra = [x for x, used in zip(_extras(s), columns, strict=True) if used]
            design[i, len(rows) :] = extra
        ms = np.array([s.ms for s in samples])
        scale = np.abs(design).max(axis=0)
        solution = np.linalg.lstsq(design / scale / ms[:, None], np.ones(len(samples)), rcond=None)[0] / scale
        fitted = iter(solution[len(rows) :].tolist())
        slopes = [next(fitted) if used else 0.0 for used in columns]
        if min(slopes) >= 0.0:
            return slopes[0], slopes[1], slopes[2]
        columns = [used and slope >= 0.0 for used, slope in zip(columns, slopes, strict=True)]  # noise: leave it out
    return 0.0, 0.0, 0.0


def _varies(samples: Sequence[CostSample], name: str) -> bool:
    """Whether some row count was measured at more than one value, so that a slope can be told from the stairs."""
    seen: dict[int, set[int]] = {}
    for s in samples:
        seen.setdefault(s.num_rows, set()).add(getattr(s, name))
    return any(len(values) > 1 for values in seen.values())
