"""The parts of a cost table next to its curves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fingerprint:
    """The machine and the engine that a table is valid for."""

    cpu_model: str
    isa: str
    num_threads: int
    engine: str  # hash of the engine directory's manifest


@dataclass(frozen=True)
class ExitModel:
    """Early exit at a boundary, calibrated by `faser profile`.

    Log-odds that a draft passes its test: rank * min(place, 8) + gap * score gap + survival * logit(estimate before the
    pass) + intercept. pays: whether dropping rows here was faster on the profile's prompts.
    """

    boundary: int
    rank: float
    gap: float
    survival: float
    intercept: float
    pays: bool = False


@dataclass(frozen=True)
class Interference:
    """Slowdown of each stream while the other is busy too, for a pair of partitions."""

    draft_partition: str
    verify_partition: str
    draft_factor: float
    verify_factor: float
