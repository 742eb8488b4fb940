"""Compare drafting by a draft model, from the text itself, or by both.

Workloads are completions of held-out text, greedy and at temperature 0.8, and edits whose answers are replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.flags import Flags, say
from benchmarks.drafters.runner import DrafterBenchOptions, run_drafter_bench

EXAMPLE = "Example: faser bench drafters --engine_dir engines/built/demo --output_dir bench_results"


def main(argv: Sequence[str] | None = None) -> None:
    flags = Flags("drafters", DrafterBenchOptions, __doc__, EXAMPLE)
    flags.flag("engine_dir", "a directory that `faser build` wrote")
    flags.flag("output_dir", "directory for drafters.json, drafters.md and drafters.png")
    flags.flag("systems", "speculation/drafters or speculation/drafters/num_branches, separated by commas; or off")
    flags.flag("num_jobs", "prompts per workload")
    flags.flag("num_tokens", "tokens of a completion", name="max_tokens")
    flags.flag("num_rounds", "interleaved rounds of all systems")
    flags.flag("num_threads", "CPU threads; default: all cores")
    flags.flag("simulated", "run the engines for tokens only, with times from the cost table")
    options = flags.parse(argv)
    run_drafter_bench(options, say)
    print((options.output_dir / "drafters.md").read_text())


if __name__ == "__main__":
    main()
