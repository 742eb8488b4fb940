"""Measure what a step costs the host, with engines that compute nothing."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.host.options import HostBenchOptions
from benchmarks.host.runner import TEXT_FILE, run_host_bench
from faser_trtllm.bench.flags import Flags, say

EXAMPLE = """Examples:
  faser bench host --output_dir host_results --requests 32,256 --policies off,price/suffix+model
  faser bench host --output_dir gpu_host --engines gpu"""


def main(argv: Sequence[str] | None = None) -> None:
    flags = Flags("host", HostBenchOptions, __doc__, EXAMPLE)
    flags.flag("output_dir", "where host.json, host.md and host.png go")
    flags.flag("num_requests", "requests that decode at once", name="requests")
    flags.flag("systems", "as --speculation spells them, then /drafters", name="policies")
    flags.flag("engines", "null: not counted; gpu: ours, with what they cost the host, without a GPU")
    flags.flag("num_rounds", "of all policies and sizes in turn", name="rounds")
    flags.flag("num_steps", "that are timed, of each", name="steps")
    options = flags.parse(argv)
    run_host_bench(options, say)
    print((options.output_dir / TEXT_FILE).read_text())


if __name__ == "__main__":
    main()
