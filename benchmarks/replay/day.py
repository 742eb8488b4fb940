"""Compare measurements on an H100 (2026-11-26) with their simulation.

Times follow the table h100-measured; passes above 512 rows are ragged and slow the first time, as in the measured
engine. The exit code is 1 if a claimed figure is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.replay.measured_day import CLAIM, POLICIES, TIMELINE, Figure, compare
from benchmarks.replay.recording import add_options, open_recording
from lab.costmodel.measured import MeasuredGpu
from lab.simulation.synthetic_profile import synthetic_profile

TABLES = (
    (
        "Steady state: a step that only decodes, row count seen before, median ms (section timeline)",
        TIMELINE,
        "steady_median_ms",
    ),
    (
        "Steady state: tokens/s of steps that only decode, new row counts included (section timeline)",
        TIMELINE,
        "steady_tokens_per_s",
    ),
    ("Ramp and steady state: tokens/s of whole runs (section timeline)", TIMELINE, "tokens_per_s"),
    ("Ramp and steady state: tokens/s of first rounds without a warm-up (section policies)", POLICIES, "tokens_per_s"),
)


def render(figures: Sequence[Figure]) -> Iterator[str]:
    for title, section, name in TABLES:
        digits = 2 if name.endswith("_ms") else 0
        yield from (f"### {title}", "")
        yield from (
            "| requests | policy | measured | simulated | corrected for acceptance | error | not claimed, since |",
            "|---|---|---|---|---|---|---|",
        )
        for f in figures:
            if (f.run.section, f.name) == (section, name):
                values = " | ".join(f"{value:.{digits}f}" for value in (f.measured, f.simulated, f.corrected))
                reason = f.run.not_claimed.get(name, "")
                yield f"| {f.run.load} | {f.run.speculation} | {values} | {100 * f.error:+.1f} % | {reason} |"
        yield ""
    claimed = [f for f in figures if f.is_claimed]
    worst = max(claimed, key=lambda f: abs(f.error))
    mean = sum(abs(f.error) for f in claimed) / len(claimed)
    yield (
        f"{len(claimed)} of {len(figures)} figures are claimed; their mean absolute error is {100 * mean:.1f} %, the "
        f"worst {100 * worst.error:+.1f} % ({worst.run.section}, {worst.run.load} requests, {worst.run.speculation})."
    )
    for f in figures:
        if f.is_broken:
            yield (
                f"Broken: {f.name} of {f.run.section}, {f.run.load} requests, {f.run.speculation} is off by "
                f"{100 * f.error:+.1f} %, at most {100 * CLAIM:.0f} % are claimed."
            )


def as_json(figure: Figure) -> dict[str, Any]:
    run = figure.run
    return {
        "section": run.section,
        "load": run.load,
        "speculation": run.speculation,
        "figure": figure.name,
        "measured": figure.measured,
        "simulated": figure.simulated,
        "corrected": figure.corrected,
        "error": figure.error,
        "not_claimed": run.not_claimed.get(figure.name),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="faser bench replay.day", description=__doc__)
    add_options(parser)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args(argv)
    figures = list(compare(open_recording(given), synthetic_profile(MeasuredGpu(is_padded=False))))
    print("SIMULATED next to what was measured on an H100, 2026-11-26\n")
    print("\n".join(render(figures)))
    if given.json is not None:
        given.json.write_text(json.dumps([as_json(figure) for figure in figures], indent=1) + "\n")
    return int(any(figure.is_broken for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
