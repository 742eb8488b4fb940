"""Print published acceptance curves as `synthetic_acceptance` of faser.yaml.

A synthetic run accepts drafts at random with the rates of a different pair, to measure a system; its outputs are not
the target's. Without FILE the curves are InferenceX's golden ones (Apache-2.0, SPEED-Bench coding), which
`synthetic_acceptance` also accepts by name. A FILE has their format: name, thinking mode, and the mean acceptance
length by number of draft tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from faser_trtllm.acceptance_curves import PUBLISHED, by_place, parse_curves
from faser_trtllm.config import read_mapping
from faser_trtllm.errors import InvalidArgumentError


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="faser bench golden", description=__doc__)
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, default=PUBLISHED)
    parser.add_argument("--curve", help="print only this curve, such as qwen3.5-397b-a17b-nvfp4-mtp/thinking_on")
    options = parser.parse_args(argv)
    curves = parse_curves(read_mapping(options.file), options.file.name)
    if options.curve is not None and options.curve not in curves:
        raise InvalidArgumentError(f"curve is {options.curve!r:.80}, the file has {', '.join(curves)}")
    for name, lengths in curves.items():
        if options.curve in (None, name):
            chances = [round(chance, 4) for chance in by_place(lengths)]
            off = max(abs(a - b) for a, b in zip(lengths_of(chances), lengths, strict=True))
            spelled = " ".join(f"{length:g}" for length in lengths)
            print(f"# {name}: acceptance length {spelled}; off by {off:.2f} at most")
            print(f"synthetic_acceptance: {chances}")


def lengths_of(chances: Sequence[float]) -> tuple[float, ...]:
    """Return the mean acceptance lengths for 1, 2, ... draft tokens; the inverse of by_place."""
    found, reached, length = [], 1.0, 1.0
    for chance in chances:
        reached *= chance
        length += reached
        found.append(length)
    return tuple(found)


if __name__ == "__main__":
    main()
