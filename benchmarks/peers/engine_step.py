"""Latency of one pass of a CPU engine file, by rows and threads, as JSON.

    python -m benchmarks.peers.engine_step E/target/rank0.engine --rows 1 4 16 64 --threads 1 2

With 4 rows or more each request has 4 rows, as in verification with 3 drafts. Thread counts alternate within each
round, so that a slow machine affects all of them; ratios are paired by round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common.stats import paired_ratio, summarize
from faser_trtllm import native
from faser_trtllm.core.batch import BatchBuilder, RaggedBatch
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.partition.core_set import CoreSet

ROWS_PER_REQUEST = 4
TOKENS_PER_BLOCK = 32
PASSES_PER_ROUND = 5


def measure(
    path: Path, num_rows: Sequence[int], num_threads: Sequence[int], context: int, num_rounds: int
) -> dict[str, Any]:
    """Measure ms per pass (median and range over rounds) for each number of threads and rows."""
    max_batch_size = max(1, max(num_rows) // ROWS_PER_REQUEST)
    max_blocks = -(-(context + max(num_rows)) // TOKENS_PER_BLOCK)
    table = np.arange(max_batch_size * max_blocks, dtype=np.int32).reshape(max_batch_size, max_blocks)
    times: dict[int, dict[int, list[float]]] = {t: {n: [] for n in num_rows} for t in num_threads}
    with ExitStack() as stack:
        engines = {
            t: stack.enter_context(
                CpuEngine.open(
                    path,
                    stack.enter_context(CoreSet(num_threads=t)),
                    num_blocks=table.size,
                    tokens_per_block=TOKENS_PER_BLOCK,
                    max_batch_size=max_batch_size,
                    max_num_tokens=max(context, *num_rows),
                )
            )
            for t in num_threads
        }
        batches: dict[int, RaggedBatch] = {}
        for n in num_rows:
            num_requests = max(1, n // ROWS_PER_REQUEST)
            rows = [len(part) for part in np.array_split(np.arange(n), num_requests)]
            batches[n] = _batch(table, [(slot, context, context + count) for slot, count in enumerate(rows)])
        for engine in engines.values():
            for slot in range(max_batch_size):
                engine.forward(_batch(table, [(slot, 0, context)]))
        for _ in range(num_rounds):
            for n, batch in batches.items():
                for t, engine in engines.items():
                    times[t][n].append(_milliseconds(lambda e=engine, b=batch: e.forward(b)))  # type: ignore[misc]
    first = num_threads[0]
    return {
        "isa": native.isa(),
        "context": context,
        "num_rounds": num_rounds,
        "results": [
            {
                "num_threads": t,
                "num_rows": n,
                "median_ms": round(summarize(times[t][n]).median, 4),
                "min_ms": round(summarize(times[t][n]).low, 4),
                f"speedup_over_{first}_threads": round(paired_ratio(times[first][n], times[t][n]).median, 2),
            }
            for t in num_threads
            for n in num_rows
        ],
    }


def _batch(table: npt.NDArray[np.int32], rows: Sequence[tuple[int, int, int]]) -> RaggedBatch:
    longest = max(end for _, _, end in rows)
    builder = BatchBuilder(table)
    tokens = np.arange(longest, dtype=np.int32) % 50 + 1
    for slot, first, end in rows:
        builder.add(slot, tokens, first, end, end - first)
    return builder.build()


def _milliseconds(run: Callable[[], object]) -> float:
    run()
    start = time.perf_counter()
    for _ in range(PASSES_PER_ROUND):
        run()
    return (time.perf_counter() - start) * 1e3 / PASSES_PER_ROUND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path, help="a rank0.engine file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--context", type=int, default=256, help="tokens in each request's cache")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    result = measure(arguments.engine, arguments.rows, arguments.threads, arguments.context, arguments.rounds)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
