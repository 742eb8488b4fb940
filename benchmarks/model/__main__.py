"""Compare the GPU cost model with public measurements and with our own on an H100.

Needs no GPU; the points are in data/.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.model.own_points import read_own_points
from benchmarks.model.report import render_own, render_validation
from benchmarks.model.validation import compare_all


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="faser bench model", description=__doc__)
    parser.add_argument("--output_file", type=Path, help="write to this file instead of stdout")
    given = parser.parse_args(argv)
    text = f"{render_own(read_own_points())}\n{render_validation(compare_all())}"
    if given.output_file is None:
        print(text, end="")
    else:
        given.output_file.write_text(text)


if __name__ == "__main__":
    main()
