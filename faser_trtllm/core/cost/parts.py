"""Parts of a cost table other than its curves."""

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
    """An early-exit model for one segment boundary, calibrated by `faser profile`.

    The log-odds that a draft is accepted are rank * min(place, 8) + gap * score gap + survival * logit(estimate before
    the pass) + intercept.
    """

    boundary: int
    rank: float
    gap: float
    survival: float
    intercept: float
    pays: bool = False  # dropping rows here was faster on the profile's prompts


@dataclass(frozen=True)
class Interference:
    """Slowdown of each stream while the other one also runs, for a pair of partitions."""

    draft_partition: str
    verify_partition: str
    draft_factor: float
    verify_factor: float
