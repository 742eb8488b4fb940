"""Simulate the FASER paper's ablation, and its open questions, on modeled GPUs.

The real scheduler and policies run on modeled times.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.flags import Flags, say
from benchmarks.paper.runner import TEXT_FILE, PaperBenchOptions, run_paper_bench

EXAMPLE = "Example: faser bench paper --output_dir paper_results --sections ablation,adaptive"


def main(argv: Sequence[str] | None = None) -> None:
    flags = Flags("paper", PaperBenchOptions, __doc__, EXAMPLE)
    flags.flag("output_dir", "directory for paper.json, paper.md and plots")
    flags.flag("sections", "sections to simulate")
    flags.flag("minutes", "minutes after which no setting is started")
    options = flags.parse(argv)
    run_paper_bench(options, say)
    print((options.output_dir / TEXT_FILE).read_text())


if __name__ == "__main__":
    main()
