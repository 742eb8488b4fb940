"""Measure speculation on random mixtures of experts.

Compares `price`, `price` with costs by rows only, `off` and every fixed length, interleaved, by acceptance and batch
size.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.flags import Flags, say
from benchmarks.moe.options import MoeBenchOptions
from benchmarks.moe.runner import run_moe_bench

EXAMPLE = "Example: faser bench moe --output_dir bench_results --quick"


def main(argv: Sequence[str] | None = None) -> None:
    flags = Flags("moe", MoeBenchOptions, __doc__, EXAMPLE)
    flags.flag("output_dir", "directory for moe.json and moe.md")
    flags.flag("models_dir", "directory to keep and reuse checkpoints, engines and profiles")
    flags.flag("embedding_scales", "one model per scale; larger scales route neighboring rows less alike")
    flags.flag("acceptance", "probabilities that a draft is accepted")
    flags.flag("batch_sizes", "concurrent requests")
    flags.flag("fixed", "draft lengths of the fixed policies")
    flags.flag("num_fixed_kept", "number of fixed policies that go on after a cell's first block, the fastest ones")
    flags.flag("seconds", "seconds of a cell, for all systems together")
    flags.flag("learning_s", "seconds that systems with price run alone at the start of a cell, in addition")
    flags.flag("blocks", "blocks of a cell, after one for warm-up")
    flags.flag("profile_s", "seconds for `faser profile`")
    flags.flag("quick_profile", "use the quick profile of `faser build`")
    flags.flag("quantization", "quantization of the target, as for `faser build`")
    flags.flag("num_threads", "threads of every system; default: all cores")
    options = flags.parse(argv)
    run_moe_bench(options, say)
    print((options.output_dir / "moe.md").read_text())


if __name__ == "__main__":
    main()
