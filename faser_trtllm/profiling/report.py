"""Results of a profile as values, JSON and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faser_trtllm.core.cost_curve import read_samples
from faser_trtllm.core.cost_table import ALL, CostSample, CostTable, CurveError
from faser_trtllm.core.curve_error import fit_curves
from faser_trtllm.errors import InvalidArgumentError, reason_of
from faser_trtllm.json_text import parse_json
from faser_trtllm.profiling.exit_models import ExitQuality


@dataclass(frozen=True)
class ProfileReport:
    """The results of a profile. Curves are fitted to samples, not to held_out. seconds: time of the whole profile."""

    table: CostTable
    samples: tuple[CostSample, ...]
    held_out: tuple[CostSample, ...]
    exit_quality: tuple[ExitQuality, ...]
    num_exit_observations: int
    num_rounds: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the contents of profile.json: the cost table with the samples that it was fitted to."""
        return self.table.to_json() | {
            "samples": [asdict(s) for s in self.samples],
            "held_out": [asdict(s) | {"predicted_ms": predict(self.table, s)} for s in self.held_out],
            "exit_quality": [asdict(q) for q in self.exit_quality],
            "num_exit_observations": self.num_exit_observations,
            "num_rounds": self.num_rounds,
            "seconds": self.seconds,
        }


def refit_errors(path: Path) -> Mapping[str, CurveError]:
    """Fit the samples of a profile.json; return errors by "kind@partition". InvalidArgumentError without samples."""
    try:
        data = parse_json(path.read_bytes(), finite=True)
        samples, held_out = (read_samples(data.get(name) or ()) for name in ("samples", "held_out"))
        verify = (data.get("curves") or {}).get(f"verify@{ALL}") or {}
        errors = fit_curves(samples, held_out, tuple(map(int, verify.get("sizes", ()))))[1]
    except OSError as error:
        raise InvalidArgumentError(
            f"refit is {path}, which cannot be read ({reason_of(error)}); name a profile.json"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise InvalidArgumentError(
            f"refit is {path}, which is no profile ({reason_of(error)}); name a profile.json that `faser build` or "
            "`faser profile` wrote"
        ) from error
    if not samples:
        raise InvalidArgumentError(
            f"refit is {path}, which keeps no samples; name a profile.json that `faser build` or `faser profile` wrote"
        )
    return errors


def error_lines(errors: Mapping[str, CurveError]) -> Iterator[str]:
    yield f"{'mean error of a curve':<22} {'in-sample':>10} {'held-out':>10}"
    for key, error in sorted(errors.items()):
        notes = ("fitted without slopes" if error.refitted else "", "left out" if error.left_out else "")
        note = ", ".join(note for note in notes if note)
        yield f"{key:<22} {_percent(error.in_sample):>10} {_percent(error.held_out):>10}  {note}".rstrip()


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def predict(table: CostTable, sample: CostSample) -> float | None:
    """Return the ms that the sample's curve predicts; None if the table has no such curve."""
    curve = table.curves.get(sample.curve)
    if curve is None:
        return None
    return curve.at(sample.num_rows, sample.num_requests, sample.context_len, sample.num_experts)
