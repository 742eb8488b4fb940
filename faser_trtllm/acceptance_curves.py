"""Acceptance curves: mean acceptance lengths by number of draft tokens, and chances by place made of them.

golden_acceptance.yaml next to this has InferenceX's golden ones (Apache-2.0), which are taken by name.
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
    """Return by name/mode the mean acceptance length of 1, 2, ... draft tokens, the target's own token included.

    data: of a file, source its name. InvalidArgumentError names the curve at fault.
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
    """Curves by each name that they are taken by: model-drafter/mode, model-drafter where a pair has one mode, and a
    drafter of DRAFTERS, whose curve is the mean of its pairs'."""
    golden = parse_curves(yaml.safe_load(PUBLISHED.read_text()), PUBLISHED.name)
    pairs = [name.partition("/")[0] for name in golden]
    found = {pair: curve for pair, curve in zip(pairs, golden.values(), strict=True) if pairs.count(pair) == 1}
    for drafter in DRAFTERS:
        curves = [curve for pair, curve in zip(pairs, golden.values(), strict=True) if drafter in pair.split("-")]
        found[drafter] = tuple(sum(lengths) / len(lengths) for lengths in zip(*curves, strict=True))
    return golden | found


def published_names() -> str:
    """Return the names for a message: the drafters, then every curve once."""
    return ", ".join((*DRAFTERS, *(name for name in published_curves() if "/" in name)))


def by_place(lengths: Sequence[float]) -> tuple[float, ...]:
    """The chance that the draft at each place is accepted, given those before it, from mean acceptance lengths of
    1, 2, ... draft tokens.

    The share of steps that accept the j-th draft is lengths[j] - lengths[j - 1], which makes the mean right for every
    draft length at once. It cannot rise with j nor be negative; where measured lengths say so, it is the nearest
    sequence of which that is true (pool adjacent violators, then at least 0).
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


def lengths_of(chances: Sequence[float]) -> tuple[float, ...]:
    """The mean acceptance lengths of 1, 2, ... draft tokens with these chances; the inverse of by_place."""
    found, reached, length = [], 1.0, 1.0
    for chance in chances:
        reached *= chance
        length += reached
        found.append(length)
    return tuple(found)


def _lengths(where: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, Mapping) or not 1 <= len(value) <= MAX_DRAFT_LEN:
        raise InvalidArgumentError(f"{where} must have lengths of 1 to {MAX_DRAFT_LEN} numbers of draft tokens")
    found = []
    for count in range(1, len(value) + 1):
        length = value.get(count)
        if type(length) not in (int, float) or not 1.0 <= length <= count + 1.0:  # type: ignore[operator]
            raise InvalidArgumentError(f"{where} has {length!r:.40} at {count}, it must be 1 to {count + 1}")
        found.append(float(length))  # type: ignore[arg-type]
    return tuple(found)
