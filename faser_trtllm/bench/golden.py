"""Print published acceptance curves as `synthetic_acceptance` of faser.yaml.

A synthetic run accepts drafts at random with the chances of another pair, to measure a system; its outputs are not the
target's. Without FILE the curves are InferenceX's golden ones (Apache-2.0, SPEED-Bench coding); a FILE has their
format: name, thinking mode, then the mean acceptance length by number of draft tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from faser_trtllm.config import read_mapping
from faser_trtllm.errors import InvalidArgumentError

PUBLISHED = Path(__file__).with_name("golden_acceptance.yaml")
MAX_CURVES = 1024
MAX_DRAFT_LEN = 64

Curves = dict[str, tuple[float, ...]]


def read_curves(path: Path = PUBLISHED) -> Curves:
    """Return by name/mode the mean acceptance length of 1, 2, ... draft tokens, the target's own token included.

    InvalidArgumentError names the curve at fault.
    """
    found: Curves = {}
    for name, modes in read_mapping(path).items():
        for mode, lengths in (modes if isinstance(modes, dict) else {"": None}).items():
            found[f"{name}/{mode}"] = _lengths(f"{path.name}: {name!s:.80}/{mode!s:.80}", lengths)
            if len(found) > MAX_CURVES:
                raise InvalidArgumentError(f"{path.name} has more than {MAX_CURVES} curves; split it")
    if not found:
        raise InvalidArgumentError(f"{path.name} has no curves; give name, mode, and lengths by number of draft tokens")
    return found


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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="faser bench golden", description=__doc__)
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, default=PUBLISHED)
    parser.add_argument("--curve", help="only this one, such as qwen3.5-397b-a17b-nvfp4-mtp/thinking_on")
    options = parser.parse_args(argv)
    curves = read_curves(options.file)
    if options.curve is not None and options.curve not in curves:
        raise InvalidArgumentError(f"curve is {options.curve!r:.80}, the file has {', '.join(curves)}")
    for name, lengths in curves.items():
        if options.curve in (None, name):
            chances = [round(chance, 4) for chance in by_place(lengths)]
            off = max(abs(a - b) for a, b in zip(lengths_of(chances), lengths, strict=True))
            spelled = " ".join(f"{length:g}" for length in lengths)
            print(f"# {name}: acceptance length {spelled}; off by {off:.2f} at most")
            print(f"synthetic_acceptance: {chances}")


if __name__ == "__main__":
    main()
