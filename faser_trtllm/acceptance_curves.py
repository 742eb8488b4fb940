"""Acceptance curves: mean acceptance length by number of draft tokens, and the conversion to chances by position.

golden_acceptance.yaml, next to this file, has InferenceX's golden curves (Apache-2.0).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from faser_trtllm.errors import InvalidArgumentError

PUBLISHED = Path(__file__).with_name("golden_acceptance.yaml")
DRAFTERS = ("dspark", "eagle3", "mtp")
MAX_CURVES = 1024
MAX_DRAFT_LEN = 64

Curves = dict[str, tuple[float, ...]]


def parse_curves(data: Mapping[Any, Any], source: str) -> Curves:
    """Return the mean acceptance lengths for 1, 2, ... draft tokens by "name/mode", the target's own token included.

    source: the name of the file that data comes from. Raises InvalidArgumentError, naming the curve at fault.
    """
    found: Curves = {}
    for name, modes in data.items():
        for mode, lengths in (modes if isinstance(modes, dict) else {"": None}).items():
            found[f"{name}/{mode}"] = _lengths(f"{source}: {name!s:.80}/{mode!s:.80}", lengths)
            if len(found) > MAX_CURVES:
                raise InvalidArgumentError(f"{source} has more than {MAX_CURVES} curves; split it")
    if not found:
        raise InvalidArgumentError(f"{source} has no curves; give name, mode, and lengths by number of draft tokens")
    return found


@functools.cache
def published_curves() -> Curves:
    """Return the published curves by every name they have: "model-drafter/mode", "model-drafter" if the pair has only
    one mode, and a drafter of DRAFTERS for the mean over its pairs."""
    golden = parse_curves(yaml.safe_load(PUBLISHED.read_text()), PUBLISHED.name)
    pairs = [name.partition("/")[0] for name in golden]
    found = {pair: curve for pair, curve in zip(pairs, golden.values(), strict=True) if pairs.count(pair) == 1}
    for drafter in DRAFTERS:
        curves = [curve for pair, curve in zip(pairs, golden.values(), strict=True) if drafter in pair.split("-")]
        found[drafter] = tuple(sum(lengths) / len(lengths) for lengths in zip(*curves, strict=True))
    return golden | found


def published_names() -> str:
    """Return all names for an error message: the drafters, then every curve once."""
    return ", ".join((*DRAFTERS, *(name for name in published_curves() if "/" in name)))


def by_place(lengths: Sequence[float]) -> tuple[float, ...]:
    """Convert mean acceptance lengths for 1, 2, ... draft tokens to each position's conditional acceptance chance.

    The share of steps that accept draft j is lengths[j] - lengths[j - 1], so the mean is right for every draft length.
    This share can neither be negative nor rise with j. Measured lengths that violate this are replaced by the nearest
    valid sequence (pool adjacent violators, then clipped at 0).
    """
    pools: list[tuple[float, int]] = []  # sum, number of places
    for place, length in enumerate(lengths):
        pools.append((length - (lengths[place - 1] if place else 1.0), 1))
        while len(pools) > 1 and pools[-1][0] * pools[-2][1] > pools[-2][0] * pools[-1][1]:
            (total, count), (before, num_before) = pools.pop(), pools.pop()
            pools.append((total + before, count + num_before))
    shares = [max(0.0, total / count) for total, count in pools for _ in range(count)]
    chances, reached = [], 1.0
    for share in shares:
        chances.append(min(1.0, share / reached) if reached else 0.0)
        reached = share
    return tuple(chances)


def _lengths(where: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, Mapping) or not 1 <= len(value) <= MAX_DRAFT_LEN:
        raise InvalidArgumentError(f"{where} must have lengths of 1 to {MAX_DRAFT_LEN} numbers of draft tokens")
    found = []
    for count in range(1, len(value) + 1):
        length = value.get(count)
        if type(length) not in (int, float) or not 1.0 <= length <= count + 1.0:  # type: ignore[operator]
            raise InvalidArgumentError(f"{where} has {length!r:.40} at {count}; it must be 1 to {count + 1}")
        found.append(float(length))  # type: ignore[arg-type]
    return tuple(found)
