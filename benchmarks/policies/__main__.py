"""Compare the policies with each other and with the oracle.

Each is measured at every concurrency, and on a trace whose load swings.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.flags import Flags, say
from benchmarks.policies.options import PolicyBenchOptions
from benchmarks.policies.runner import run_policy_bench

EXAMPLE = (
    "Example: faser bench policies --checkpoint_dir engines/demo/target --draft_checkpoint_dir engines/demo/draft "
    "--output_dir bench_results --quick"
)


def main(argv: Sequence[str] | None = None) -> None:
    flags = Flags("policies", PolicyBenchOptions, __doc__, EXAMPLE)
    flags.flag("checkpoint_dir", "target checkpoint")
    flags.flag("draft_checkpoint_dir", "draft checkpoint")
    flags.flag("output_dir", "directory for policies.json, policies.md and the plots")
    flags.flag("expand", "sizes of the target, as multiples of its layers")
    flags.flag("concurrency", "concurrent requests")
    flags.flag("fixed", "draft lengths of the policies fixed:K")
    flags.flag("policies", "policies in addition to off and fixed:K, by their labels in the report")
    flags.flag("bursty", "also measure a trace whose load swings by a factor of 35")
    flags.flag("minutes", "minutes to measure; results that fit are reported")
    flags.flag("num_threads", "CPU threads; default: all cores")
    flags.flag("simulated", "run the engines for tokens only, with times from cost tables")
    flags.flag("cost_table", "profile.json of the machine to simulate")
    flags.flag("slowdown", "slow a simulated machine by up to this factor for a while")
    options = flags.parse(argv)
    run_policy_bench(options, say)
    print((options.output_dir / "policies.md").read_text())


if __name__ == "__main__":
    main()
