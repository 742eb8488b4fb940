"""The measured cost of passes on one machine: a curve (core/cost_curve.py) for each kind of pass and partition."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.core.cost.parts import ExitModel, Fingerprint, Interference
from faser_trtllm.core.cost_curve import ALL, CostCurve, CostSample, read_curve
from faser_trtllm.core.curve_error import CurveError, describe, fit_curves
from faser_trtllm.core.nnls import FloatArray
from faser_trtllm.errors import ConfigError, reason_of
from faser_trtllm.json_text import parse_json, write_json

__all__ = [
    "ALL",
    "CONTEXT_BUCKET",
    "CostCurve",
    "CostSample",
    "CostTable",
    "CurveError",
    "ExitModel",
    "Fingerprint",
    "Interference",
    "Routing",
]

FORMAT = 1
CONTEXT_BUCKET = 16  # tokens
MEASURED, MODELED = "measured", "modeled"  # CostTable.source


def context_bucket(context_len: float) -> int:
    """Return the index of the nearest multiple of CONTEXT_BUCKET."""
    return max(0, round(context_len / CONTEXT_BUCKET))


@dataclass(frozen=True)
class CostTable:
    """All that is known of the cost of passes on one machine with one pair of engines."""

    fingerprint: Fingerprint
    curves: Mapping[str, CostCurve]  # by "kind@partition"
    interference: tuple[Interference, ...] = ()
    exits: tuple[ExitModel, ...] = ()
    overhead_ms: float = 0.0  # of a step, in addition to drafting and the pass
    errors: Mapping[str, CurveError] = field(default_factory=dict)  # by "kind@partition", left-out curves included
    source: str = MEASURED  # or MODELED from anchors, for simulations only; held_out is then on public measurements
    anchors: str = ""  # what a modeled table was computed from, in words
    traffic: Mapping[str, Any] | None = None  # memory traffic of modeled passes (lab/costmodel/traffic.py)
    warning: str = ""  # one sentence if other work disturbed the measurement
    quick: bool = False  # of a quick profile, which a server may replace when it starts
    routing: Routing | None = None  # of a mixture of experts; the default for passes whose experts are not given
    _bases: dict[str, FloatArray] = field(default_factory=dict, init=False, repr=False, compare=False)  # of curves

    @staticmethod
    def fit(
        samples: Sequence[CostSample],
        fingerprint: Fingerprint,
        *,
        held_out: Sequence[CostSample] = (),
        interference: Iterable[Interference] = (),
        exits: Iterable[ExitModel] = (),
        overhead_ms: float = 0.0,
        warning: str = "",
        quick: bool = False,
        sizes: tuple[int, ...] = (),
        routing: Routing | None = None,
    ) -> CostTable:
        """Fit every curve that has samples; raise ValueError if "verify" has none on the partition "all". Policies for
        a draft model need "draft_step" too.

        held_out: samples that judge the curves but are never fitted. Curves that are too far off are left out if
        another can stand in (core/curve_error.py). sizes: what passes are padded to.
        """
        if not any(sample.curve == f"verify@{ALL}" for sample in samples):
            raise ValueError(f"no samples of verify on the partition {ALL!r}")
        curves, errors = fit_curves(samples, held_out, sizes)
        return CostTable(
            fingerprint,
            curves,
            tuple(interference),
            tuple(exits),
            overhead_ms,
            errors,
            warning=warning,
            quick=quick,
            routing=routing,
        )

    @property
    def held_out_errors(self) -> Mapping[str, float]:
        """Held-out errors of the curves in use, by kind, on the partition "all"."""
        found = ((key.partition("@"), error) for key, error in self.errors.items() if not error.left_out)
        return {
            kind: error.held_out for (kind, _, place), error in found if place == ALL and error.held_out is not None
        }

    @property
    def doubtful_kinds(self) -> tuple[str, ...]:
        """Kinds with a curve that is off by more than MAX_ERROR or was left out."""
        return tuple(sorted({key.partition("@")[0] for key, error in self.errors.items() if error.is_doubtful}))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences for users: other work disturbed the measurement, or curves do not fit it."""
        found = (self.warning, describe(self.errors) if self.source == MEASURED else "")
        return tuple(sentence for sentence in found if sentence)

    @property
    def partitions(self) -> tuple[str, ...]:
        """Partitions on which a target pass was measured."""
        return tuple(sorted(key.partition("@")[2] for key in self.curves if key.startswith("verify@")))

    def has(self, kind: str, partition: str = ALL) -> bool:
        return f"{kind}@{partition}" in self.curves

    def verify_ms(
        self,
        num_rows: int,
        num_requests: int,
        context_len: float,
        partition: str = ALL,
        num_experts: float | None = None,
    ) -> float:
        """Return ms of a target pass; num_experts: distinct experts of a layer that it reads, None: by routing."""
        return self._ms(f"verify@{partition}", num_rows, num_requests, context_len, num_experts)

    def decode_ms(self, num_requests: int, context_len: float, num_experts: float | None = None) -> float:
        """Return ms of a target pass of one row per request without drafting between passes, when the target's weights
        are still in the caches; verify_ms if this was not measured."""
        kind = "decode" if self.has("decode") else "verify"
        return self._ms(f"{kind}@{ALL}", num_requests, num_requests, context_len, num_experts)

    def draft_step_ms(self, num_requests: int, context_len: float, partition: str = ALL) -> float:
        """Return ms of one autoregressive step of the draft model."""
        return self._curve("draft_step", partition).at(num_requests, num_requests, context_len)

    def draft_rows_ms(self, num_rows: int, num_requests: int, context_len: float, partition: str = ALL) -> float:
        """Return ms of the draft model's pass over committed tokens that it has not seen, for a block drafter with its
        pass over the blocks; if this was not measured, return ms of a draft step."""
        return self._curve(self._first_kind(partition), partition).at(num_rows, num_requests, context_len)

    def _first_kind(self, partition: str) -> str:
        return next((kind for kind in ("draft_block", "draft_rows") if self.has(kind, partition)), "draft_step")

    def verify_ms_array(self, max_rows: int, num_requests: int, context_len: float, partition: str = ALL) -> FloatArray:
        """Return verify_ms for 0 to max_rows rows, context rounded to CONTEXT_BUCKET."""
        return self._with_experts("verify", max_rows, num_requests, context_len, partition)

    def rows_ms_array(self, max_rows: int, num_requests: int, context_len: float) -> FloatArray:
        """Return verify_ms_array on the partition "all" without the time of experts."""
        return self._array("verify", max_rows, num_requests, context_len, ALL)

    @property
    def per_expert_ms(self) -> float:
        """ms of a target pass per distinct expert of a layer, on the partition "all"."""
        return self._curve("verify", ALL).per_expert_ms

    def draft_step_ms_array(self, max_requests: int, context_len: float, partition: str = ALL) -> FloatArray:
        """Return draft_step_ms for 0 to max_requests requests."""
        return self._array("draft_step", max_requests, 0, context_len, partition)

    def draft_first_ms_array(
        self, max_requests: int, rows_per_request: float, context_len: float, partition: str = ALL
    ) -> FloatArray:
        """Return ms of a draft call's first step for 0 to max_requests requests. It also runs the rows_per_request
        tokens that each has committed since the last call (1 to 2 in steady drafting)."""
        kind = self._first_kind(partition)
        if kind == "draft_step":
            return self.draft_step_ms_array(max_requests, context_len, partition)
        curve = self._curve(kind, partition)
        n = np.arange(max_requests + 1, dtype=np.float64)
        rows = rows_per_request * n
        by_rows = self._array(kind, int(rows[-1]) + 1, 0, context_len, partition)
        found: FloatArray = np.interp(rows, np.arange(by_rows.size), by_rows)
        return found + curve.request_ms(context_len) * n

    def remaining_ms_array(self, boundary: int, max_rows: int, num_requests: int, context_len: float) -> FloatArray:
        """Return ms of the segments from index boundary of EngineSpec.segments on, for 0 to max_rows rows."""
        kinds = [f"segment:{i}" for i in range(boundary, self.num_segments)]
        arrays = [self._with_experts(kind, max_rows, num_requests, context_len, ALL) for kind in kinds]
        return np.sum(arrays, axis=0)  # type: ignore[no-any-return]

    def segment_ms(
        self, segment: int, num_rows: int, num_requests: int, context_len: float, num_experts: float | None = None
    ) -> float:
        """Return ms of one segment of the target (0 is the first) on the partition "all"."""
        return self._ms(f"segment:{segment}@{ALL}", num_rows, num_requests, context_len, num_experts)

    def exit_ms(self, boundary: int, num_rows: int) -> float:
        """Return ms of scoring the candidates of num_rows rows at a boundary; 0 if not measured."""
        curve = self.curves.get(f"exit:{boundary}@{ALL}")
        return curve.at(num_rows, 0, 0) if curve is not None else 0.0

    @property
    def num_segments(self) -> int:
        """Number of segments that were measured one by one; 0 without exit layers."""
        return sum(1 for key in self.curves if key.startswith("segment:") and key.endswith(f"@{ALL}"))

    def interference_of(self, draft_partition: str, verify_partition: str) -> Interference | None:
        """Return the measured slowdown of this pair of partitions, or None."""
        pair = (draft_partition, verify_partition)
        return next((i for i in self.interference if (i.draft_partition, i.verify_partition) == pair), None)

    def check_measured(self, name: str) -> None:
        """Raise ConfigError for a modeled table, which was not measured on this machine. name: its file."""
        if self.source != MEASURED:
            raise ConfigError(
                f"the cost table {name} is {self.source} (from {self.anchors}), which is for `faser plan` and "
                "simulations; to serve, measure this machine with `faser profile`"
            )

    def _check_complete(self, name: str) -> None:
        """Raise ConfigError for a table that was edited so that no step can be priced with it. name: its file."""
        segments = [f"segment:{i}@{ALL}" for i in range(self.num_segments)]
        missing = [key for key in (f"verify@{ALL}", *segments) if key not in self.curves]
        factors = [factor for pair in self.interference for factor in (pair.draft_factor, pair.verify_factor)]
        if missing:
            reason = f"has no curve {missing[0]}"
        elif self.overhead_ms < 0.0 or min(factors, default=1.0) <= 0.0:
            reason = f"has times below 0 (overhead_ms {self.overhead_ms:g}, interference {factors})"
        else:
            return
        raise ConfigError(f"the cost table {name} {reason}; run `faser profile` again")

    def to_json(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "fingerprint": asdict(self.fingerprint),
            "curves": {key: asdict(curve) for key, curve in self.curves.items()},
            "interference": [asdict(i) for i in self.interference],
            "exits": [asdict(e) for e in self.exits],
            "overhead_ms": self.overhead_ms,
            "errors": {key: asdict(error) for key, error in self.errors.items()},
            "source": self.source,
            "anchors": self.anchors,
            "traffic": self.traffic,
            "warning": self.warning,
            "quick": self.quick,
            "routing": None if self.routing is None else asdict(self.routing),
        }

    @staticmethod
    def from_json(data: Mapping[str, object]) -> CostTable:
        """Parse the result of to_json, ignoring unknown keys; raise ConfigError if it is invalid."""
        try:
            if data["format"] != FORMAT:
                raise ConfigError(
                    f"the cost table has format {data['format']!r:.40}, but {FORMAT} is needed; run `faser profile` "
                    "again"
                )
            found = _file_type().validate_python(data)
            curves = {key: read_curve(curve) for key, curve in found.curves.items()}
            return CostTable(**vars(found) | {"curves": curves})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"the cost table is incomplete or invalid at {where} ({first['msg'].lower()}); run `faser "
                "profile` again"
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigError(
                f"the cost table is incomplete or invalid ({error!r}); run `faser profile` again"
            ) from error

    @staticmethod
    def read(path: Path) -> CostTable:
        """Read a table of any machine from a file; raise ConfigError if it is invalid."""
        try:
            data = parse_json(path.read_bytes(), finite=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the cost table {path.name} cannot be read ({reason_of(error)}); run `faser profile`"
            ) from error
        if not isinstance(data, dict):
            raise ConfigError(f"the cost table {path.name} is not a JSON object; run `faser profile` again")
        return CostTable.from_json(data)

    def save(self, path: Path) -> None:
        """Write to_json() to a file atomically."""
        write_json(self.to_json(), path)

    @staticmethod
    def load(path: Path, fingerprint: Fingerprint) -> CostTable:
        """Read a table for this machine and these engines; raise a ConfigError that names what differs."""
        table = CostTable.read(path)
        table.check_measured(path.name)
        table._check_complete(path.name)
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

    def _ms(self, key: str, num_rows: int, num_requests: int, context_len: float, num_experts: float | None) -> float:
        curve = self._curve(*key.split("@", 1))
        if num_experts is None:
            routing = self.routing if curve.per_expert_ms else None
            num_experts = 0.0 if routing is None else float(routing.distinct_of(num_rows, num_requests))
        return curve.at(num_rows, num_requests, context_len, num_experts)

    def _with_experts(
        self, kind: str, max_rows: int, num_requests: int, context_len: float, partition: str
    ) -> FloatArray:
        array = self._array(kind, max_rows, num_requests, context_len, partition)
        per_expert_ms = self._curve(kind, partition).per_expert_ms
        if self.routing is None or not per_expert_ms:
            return array
        found: FloatArray = array + per_expert_ms * self.routing.distinct_of(np.arange(array.size), num_requests)
        return found

    def _array(self, kind: str, max_rows: int, num_requests: int, context_len: float, partition: str) -> FloatArray:
        key, curve = f"{kind}@{partition}", self._curve(kind, partition)
        base = self._bases.get(key)
        if base is None or base.size <= max_rows:
            base = self._bases[key] = curve.base_ms(max_rows)
        base, context = base[: max_rows + 1], context_bucket(context_len) * CONTEXT_BUCKET
        if kind != "draft_step":
            return curve.over_rows(base, num_requests, context)
        array = curve.over_rows(base, 0, context)  # a row per request
        array[1:] += curve.request_ms(context) * np.arange(1, array.size)
        return array


@dataclass(frozen=True)
class _File:
    """The JSON of a table, with curves unparsed."""

    fingerprint: Fingerprint
    curves: dict[str, dict[str, Any]]
    interference: tuple[Interference, ...]
    exits: tuple[ExitModel, ...]
    overhead_ms: float
    errors: dict[str, CurveError]
    source: str = MEASURED
    anchors: str = ""
    traffic: dict[str, Any] | None = None
    warning: str = ""
    quick: bool = False
    routing: Routing | None = None


@functools.cache
def _file_type() -> TypeAdapter[_File]:
    return TypeAdapter(_File)
