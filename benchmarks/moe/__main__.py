"""Price speculation on random mixtures of experts.

`price`, the same with costs by rows only, `off` and every fixed length, interleaved, by acceptance and batch size.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.moe.options import MoeBenchOptions
from benchmarks.moe.runner import run_moe_bench
from faser_trtllm.bench.flags import Flags, say

EXAMPLE = "Example: faser bench moe --output_dir bench_results --quick"


def main(argv: Sequence[str] | None = None) -> None:
    flags = Flags("moe", MoeBenchOptions, __doc__, EXAMPLE)
    flags.flag("output_dir", "where moe.json and moe.md go")
    flags.flag("models_dir", "where checkpoints, engines and profiles are kept and found again")
    flags.flag("embedding_scales", "a model each; the larger, the less alike neighbours are routed")
    flags.flag("acceptance", "probabilities that a draft is accepted")
    flags.flag("batch_sizes", "requests in flight")
    flags.flag("fixed", "draft lengths of the fixed policies")
    flags.flag("num_fixed_kept", "so many of them, the fastest of a cell's first block, go on")
    flags.flag("seconds", "of a cell, for all systems together")
    flags.flag("blocks", "of a cell, after one that warms up")
    flags.flag("profile_s", "time for `faser profile`")
    flags.flag("quick_profile", "measure as `faser build` does")
    flags.flag("quantization", "of the target, as `faser build` spells it")
    flags.flag("num_threads", "threads of every system; default: all cores")
    options = flags.parse(argv)
    run_moe_bench(options, say)
    print((options.output_dir / "moe.md").read_text())


if __name__ == "__main__":
    main()
