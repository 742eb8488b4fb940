"""Measure the host's time per step, with engines that compute nothing."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.flags import Flags, say
from benchmarks.host.options import HostBenchOptions
from benchmarks.host.runner import TEXT_FILE, run_host_bench

EXAMPLE = """Examples:
  faser bench host --output_dir host_results --requests 32,256 --policies off,price/suffix+model
  faser bench host --output_dir gpu_host --engines gpu"""


def main(argv: Sequence[str] | None = None) -> None:
    flags = Flags("host", HostBenchOptions, __doc__, EXAMPLE)
    flags.flag("output_dir", "directory for host.json, host.md and host.png")
    flags.flag("num_requests", "concurrent requests", name="requests")
    flags.flag("systems", "speculation or speculation/drafters, as in faser.yaml", name="policies")
    flags.flag("engines", "null: engines are not counted; gpu: our GPU engines' host time, without a GPU")
    flags.flag("num_rounds", "rounds of all policies and sizes in turn", name="rounds")
    flags.flag("num_steps", "timed steps of each policy and size", name="steps")
    options = flags.parse(argv)
    run_host_bench(options, say)
    print((options.output_dir / TEXT_FILE).read_text())


if __name__ == "__main__":
    main()
