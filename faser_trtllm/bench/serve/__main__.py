"""Measure latency, throughput and goodput of the gRPC service.

Requests arrive by themselves (an open loop), whether or not earlier ones have been answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from faser_trtllm.bench.flags import Flags, say
from faser_trtllm.bench.serve.options import Objectives, ServeBenchOptions
from faser_trtllm.bench.serve.runner import run_serve_bench
from faser_trtllm.config import SPELLINGS
from faser_trtllm.errors import FaserError

EXAMPLES = """Examples:
  faser bench serve --engine_dir engines/built/demo-x4 --output_dir bench_results --request_rate 8 --ttft_ms 300
  with --url localhost:8001 against a running service; with --in_process for what serving costs"""


def flags() -> Flags[ServeBenchOptions]:
    """All of the bench's."""
    found = Flags("serve", ServeBenchOptions, __doc__, EXAMPLES)
    found.flag("engine_dir", "a directory that `faser build` wrote")
    found.flag("output_dir", "where serve.json and serve.md go")
    found.flag("url", "gRPC address of a running service; default: one is started")
    found.flag("speculation", SPELLINGS)
    found.flag(
        "stream_interval",
        "stream_interval of the service: steps between two responses of a request, or auto",
        convert=lambda text: int(text) if text.isdecimal() else text,
    )
    found.flag("arrivals", "poisson, gamma, bursts or trace")
    found.flag("request_rate", "mean requests per second")
    found.flag("burstiness", "for gamma: 1 is Poisson, a smaller value comes in bunches")
    found.flag("peak_ratio", "for bursts: the highest rate over the lowest")
    found.flag("period_s", "for bursts: seconds of a high and a low half together")
    found.flag("trace", "CSV with arrival_s, num_input_tokens, num_output_tokens, or an Azure LLM inference trace")
    found.flag("time_scale", "for a trace: factor on the gaps between requests")
    found.flag("num_requests", "requests to send")
    found.flag("prompt_len", "tokens of a prompt, where no trace says otherwise")
    found.flag("max_tokens", "tokens of an answer, where no trace says otherwise")
    found.flag("temperature", "0 is greedy")
    found.flag("cancel_share", "share of requests that the client cancels")
    found.flag("timeout_s", "seconds after which a request counts as failed")
    found.add_argument("--ttft_ms", type=float, help="objective for the time to the first token")
    found.add_argument("--tpot_ms", type=float, help="objective for the time per output token")
    found.add_argument("--e2e_ms", type=float, help="objective for the whole request")
    found.flag("in_process", "compare the service with the executor in this process, in turn")
    found.flag("concurrency", "for --in_process: number of streams")
    found.flag("rounds", "for --in_process: rounds to measure")
    found.flag("seed", "of arrivals and prompts")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    options = flags().parse(argv, {"objectives": Objectives})
    if options.trace is not None and options.arrivals == "poisson":
        options = replace(options, arrivals="trace")
    report = run_serve_bench(options, say)
    print((options.output_dir / "serve.md").read_text())
    if report.overhead is not None and report.overhead.num_different:
        raise FaserError("the service and the executor gave different tokens; this is a bug, please report it")


if __name__ == "__main__":
    main()
