"""Measure the share of an engine's throughput that serving costs.

Rounds alternate between the executor alone (in process) and a server with a client that only counts, with the same
greedy requests. Prints tokens per second, CPU us per token (the client's apart), and the ratio of served to in process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.edge.__main__ import PROMPT, measure
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.tokenizer import Tokenizer


def measure_in_process(options: argparse.Namespace) -> tuple[float, float]:
    """Return tokens per second and CPU us per token, after a warm-up with a tenth of the tokens."""
    prompt = Tokenizer.load(EngineDir.load(options.engine_dir).tokenizer_dir).encode(PROMPT)
    with open_executor(options.engine_dir, ExecutorConfig(speculation=options.speculation)) as executor:
        for max_tokens in (max(1, options.max_tokens // 10), options.max_tokens):
            num_ended = 0

            def sink(output: RequestOutput) -> bool:
                nonlocal num_ended
                num_ended += output.finish_reason is not None
                return False

            started_s, cpu_s = time.perf_counter(), time.process_time()
            for place in range(options.streams):
                executor.submit(f"{max_tokens}-{place}", prompt, SamplingParams(max_tokens=max_tokens), sink)
            while num_ended < options.streams:
                executor.step()
        num_tokens = options.streams * options.max_tokens
        return num_tokens / (time.perf_counter() - started_s), 1e6 * (time.process_time() - cpu_s) / num_tokens


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="faser bench edge.share", description=__doc__)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--speculation", default="fixed:4", help="policy in both cases")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max_tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream_interval", default="1", help="steps between two responses, or auto")
    options = parser.parse_args(argv)
    options.fake = options.sleeping = options.grpcio = options.stop_words = False
    num_tokens = options.streams * options.max_tokens
    rows: list[tuple[float, float, float, float]] = []
    for _ in range(options.rounds):
        alone_rate, alone_us = measure_in_process(options)
        run = measure(options)
        served_us = 1e6 * (run.cpu_s["tritonserver"] + run.cpu_s["engine"]) / num_tokens
        rows.append((alone_rate, num_tokens / run.seconds, alone_us, served_us))
    print("| | in process | served | ratio by round |\n|---|---|---|---|")
    for name, first in (("tokens/s", 0), ("CPU us per token", 2)):
        alone, served = (statistics.median(row[first + i] for row in rows) for i in (0, 1))
        ratios = ", ".join(f"{row[first + 1] / row[first]:.3f}" for row in rows)
        print(f"| {name} | {alone:.0f} | {served:.0f} | {ratios} |")


if __name__ == "__main__":
    main()
