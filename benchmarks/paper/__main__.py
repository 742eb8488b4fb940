"""Simulate the FASER paper's ablation on modelled GPUs.

Its open questions too; the real scheduler and policies run on modelled times.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.paper.runner import TEXT_FILE, PaperBenchOptions, run_paper_bench
from faser_trtllm.bench.flags import Flags, say

EXAMPLE = "Example: faser bench paper --output_dir paper_results --sections ablation,adaptive"


def main(argv: Sequence[str] | None = None) -> None:
    flags = Flags("paper", PaperBenchOptions, __doc__, EXAMPLE)
    flags.flag("output_dir", "where paper.json, paper.md and plots go")
    flags.flag("sections", "what to simulate")
    flags.flag("minutes", "no setting is begun after so many")
    options = flags.parse(argv)
    run_paper_bench(options, say)
    print((options.output_dir / TEXT_FILE).read_text())


if __name__ == "__main__":
    main()
