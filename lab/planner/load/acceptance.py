"""A random process of acceptance with published statistics, for which requests and their tokens differ.

Each request has a mean from a Beta distribution. Each of its positions has a chance around that mean, from a second
Beta distribution, which a confident draft model knows. The chance rises with a draft's place, so that acceptance by
place is that of SpecDecode-Bench's logs (arXiv 2601.11580). The process depends on seed, request and position only, so
it is the same for all policies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from faser_trtllm.acceptance_curves import by_place, published_curves, published_names
from faser_trtllm.errors import InvalidArgumentError, reason_of
from faser_trtllm.json_text import parse_json

Array = npt.NDArray[np.float64]

PUBLISHED = (0.59, 0.58, 0.63, 0.68, 0.72)  # acceptance by place, given that earlier drafts were accepted
CONCENTRATION = 20.0  # of the requests' means: 90 % of requests get 1.7 to 3.3 tokens per step with 5 drafts
SHARPNESS = 1.0  # of a position's chance, whose AUC for acceptance is 0.91
MAX_LOG_ODDS = 9.0  # of a position's chance
MIN_CHANCE = 0.001  # of a place of a published curve, some of which are flat at the end
_SAMPLES, _INNER, _SEARCH = 1500, 48, 30


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of drafts.

    by_place: chance that a draft is accepted, given those before it; later places have the last value.
    curve: name of the published curve, if it is one.
    """

    by_place: tuple[float, ...]
    concentration: float = CONCENTRATION
    sharpness: float = SHARPNESS
    curve: str | None = None

    def __post_init__(self) -> None:
        if not self.by_place or not all(0.0 < rate < 1.0 for rate in self.by_place):
            raise InvalidArgumentError(
                f"acceptance by place is {list(self.by_place)}; it must be numbers between 0 and 1; give one per place"
            )
        for name in ("concentration", "sharpness"):
            if not getattr(self, name) > 0.0:
                raise InvalidArgumentError(f"acceptance's {name} is {getattr(self, name)}; it must be more than 0")

    @staticmethod
    def of(mean: float) -> Acceptance:
        """Return acceptance that rises by place as published. mean: accepted over tested drafts, with five per step."""
        if not 0.0 < mean < 1.0:
            raise InvalidArgumentError(f"acceptance is {mean}; it must be between 0 and 1")
        published = _logit(np.array(PUBLISHED))

        def by_place(shift: float) -> Array:
            return _sigmoid(published + shift)

        low, high = -12.0, 12.0
        for _ in range(2 * _SEARCH):
            middle = (low + high) / 2
            low, high = (middle, high) if mean_of_tested(by_place(middle)) < mean else (low, middle)
        return Acceptance(tuple(by_place(low).tolist()))

    @staticmethod
    def published(name: str) -> Acceptance:
        """Return a published curve, also by a drafter's name in acceptance_curves.DRAFTERS."""
        lengths = published_curves().get(name)
        if lengths is None:
            raise InvalidArgumentError(
                f"acceptance is {name!r:.80}; it must be a number, a JSON file, or a published curve: "
                f"{published_names()}"
            )
        chances = np.clip(by_place(lengths), MIN_CHANCE, 1.0 - MIN_CHANCE)
        return Acceptance(tuple(chances.tolist()), curve=name)

    @staticmethod
    def load(path: Path) -> Acceptance:
        """Read a JSON file: {"by_place": [...]}, and "concentration" and "sharpness" if known."""
        try:
            data = parse_json(path.read_bytes(), finite=True)
            return Acceptance(tuple(float(rate) for rate in data.pop("by_place")), curve=None, **data)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise InvalidArgumentError(
                f"the acceptance file {path.name} cannot be used ({reason_of(error)}); it must hold "
                '{"by_place": [0.7, ...]}'
            ) from error


def mean_of_tested(by_place: Sequence[float] | Array) -> float:
    """Return accepted over tested drafts if each step drafts all places."""
    rates = np.asarray(by_place)
    reached = np.concatenate([[1.0], np.cumprod(rates)[:-1]])
    return float((reached * rates).sum() / reached.sum())


class AcceptanceProcess:
    """Acceptance of requests in slots [max_batch_size], for output positions up to max_len."""

    def __init__(
        self, acceptance: Acceptance, max_batch_size: int, max_len: int, max_draft_len: int, seed: int
    ) -> None:
        self._acceptance = acceptance
        self._seed = seed
        rise = _rise_by_place(acceptance)
        self._rise = np.concatenate([rise, np.full(max_draft_len, rise[-1])])[: max(1, max_draft_len)]
        self._log_odds = np.zeros((max_batch_size, max_len), np.float32)
        self._luck = np.zeros((max_batch_size, max_len), np.float32)

    def begin(self, slot: int, number: int, output_len: int) -> None:
        """Give a slot to the request with this number, and draw its acceptance."""
        rng = np.random.default_rng((self._seed, number))
        found = self._acceptance
        mean = rng.beta(*_beta(found.by_place[0], found.concentration))
        chance = rng.beta(*_beta(mean, found.sharpness), output_len)
        self._log_odds[slot, :output_len] = _bounded_logit(chance)
        self._luck[slot, :output_len] = _logit(rng.random(output_len) * (1.0 - 2e-7) + 1e-7)

    def draft(
        self, slots: npt.NDArray[np.int32], positions: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Return log-odds and acceptance of drafts at output positions and places [n, k] of n slots."""
        positions = np.minimum(positions, self._log_odds.shape[1] - 1)
        log_odds = self._log_odds[slots[:, None], positions] + self._rise[places].astype(np.float32)
        return log_odds, self._luck[slots[:, None], positions] < log_odds


@functools.lru_cache(maxsize=16)
def _rise_by_place(acceptance: Acceptance) -> Array:
    """Return log-odds to add by place, so that drawn requests and positions have acceptance.by_place."""
    rng = np.random.default_rng(0)
    means = rng.beta(*_beta(acceptance.by_place[0], acceptance.concentration), _SAMPLES)
    a, b = _beta(means[:, None], acceptance.sharpness)
    odds = _bounded_logit(rng.beta(a, b, (_SAMPLES, _INNER)))
    rise, survival = [], np.ones(_SAMPLES)
    for rate in acceptance.by_place:
        low, high = -12.0, 12.0
        for _ in range(_SEARCH):
            middle = (low + high) / 2
            chance = _sigmoid(odds + middle).mean(axis=1)
            low, high = (middle, high) if (survival * chance).sum() < rate * survival.sum() else (low, middle)
        rise.append(low)
        survival = survival * _sigmoid(odds + low).mean(axis=1)
    return np.array(rise)


def _beta(mean: npt.ArrayLike, concentration: float) -> tuple[Array, Array]:
    """Return the parameters of a Beta distribution with this mean."""
    mean = np.clip(mean, 1e-4, 1.0 - 1e-4)
    return concentration * mean, concentration * (1.0 - mean)


def _bounded_logit(chance: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.clip(_logit(chance), -MAX_LOG_ODDS, MAX_LOG_ODDS)


def _logit(p: Array) -> Array:
    return np.asarray(np.log(p) - np.log1p(-p))


def _sigmoid(x: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))
