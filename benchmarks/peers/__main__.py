"""Compare speculation with peers that run the same weights.

Our engine runs with speculation off and with fixed:1 to fixed:8.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.flags import Flags, say
from benchmarks.peers.options import BenchOptions
from benchmarks.peers.runner import run_bench
from faser_trtllm.errors import FaserError

EXAMPLE = (
    "Example: faser bench peers --checkpoint_dir engines/demo/target --draft_checkpoint_dir engines/demo/draft "
    "--output_dir bench_results --quick"
)


def _peers(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(text.split(","))


def main(argv: Sequence[str] | None = None) -> None:
    flags = Flags("peers", BenchOptions, __doc__, EXAMPLE)
    flags.flag("checkpoint_dir", "target checkpoint")
    flags.flag("draft_checkpoint_dir", "draft checkpoint")
    flags.flag("output_dir", "directory for bench.json, bench.md and bench.png")
    flags.flag("expand", "sizes of the target, as multiples of its layers")
    flags.flag("batch_sizes", "requests decoded at the same time")
    flags.flag("rounds", "rounds to measure; medians are reported")
    flags.flag("peers", "transformers, llama.cpp, openvino (separated by commas), or none", convert=_peers)
    flags.flag("transformers_python", "Python that has transformers installed")
    flags.flag("llama_python", "Python that has llama-cpp-python installed")
    flags.flag("openvino_python", "Python that has openvino-genai and optimum-intel")
    flags.flag("num_threads", "threads of every system; default: all cores")
    options = flags.parse(argv)
    report = run_bench(options, say)
    print((options.output_dir / "bench.md").read_text())
    if not report.is_exact:
        raise FaserError("speculation changed the tokens of a run; this is a bug, please report it")


if __name__ == "__main__":
    main()
