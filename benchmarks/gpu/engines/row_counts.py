"""Section "row_counts": the additional time of a pass when its number of rows occurs for the first time.

Passes of prompts have different row counts in every step. Anything chosen, loaded or prepared for one of them (a
library's kernel, launch arguments) shows in the first run.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import open_pair
from faser_trtllm.core.batch import BatchBuilder, RaggedBatch

NUM_REQUESTS, DRY_NUM_REQUESTS = 8, 2
COUNTS, DRY_COUNTS = (*range(700, 712), *range(1500, 1504)), (40, 41)
SEEN, DRY_SEEN = 640, 32  # run before, to load what all counts share


@dataclass(frozen=True)
class PassTime:
    """Times of a pass: host_ms until the call returned, device_ms between events on its stream, wall_ms until done."""

    host_ms: float
    device_ms: float
    wall_ms: float


def run(bench: Bench) -> None:
    dry, form = bench.is_dry, bench.options.forms[0]
    counts, num_requests = (DRY_COUNTS, DRY_NUM_REQUESTS) if dry else (COUNTS, NUM_REQUESTS)
    limits = PairLimits(num_requests, -(-max(counts) // num_requests), max(counts))
    with open_pair(bench, form, limits) as pair:
        for name, engine in (("target", pair.target), ("draft", pair.draft)):
            bench.record.attempt(name, lambda name=name, engine=engine: _engine(bench, form, name, engine, counts))  # type: ignore[misc]


def _engine(bench: Bench, form: str, name: str, engine: Any, counts: tuple[int, ...]) -> None:
    num_requests = DRY_NUM_REQUESTS if bench.is_dry else NUM_REQUESTS
    for _ in range(3):
        time_pass(engine, prompts_batch(engine, DRY_SEEN if bench.is_dry else SEEN, num_requests))
    batches = [prompts_batch(engine, count, num_requests) for count in counts]
    first, second = ([time_pass(engine, batch) for batch in batches] for _ in range(2))
    bench.record.table(
        f"{form}, {name}: passes of prompts by rows",
        ("rows", *(f"{run}: {what} ms" for run in ("first", "again") for what in ("host", "device", "wall"))),
        [
            (rows, *(f"{ms:.3f}" for seen in times for ms in (seen.host_ms, seen.device_ms, seen.wall_ms)))
            for rows, *times in zip(counts, first, second, strict=True)
        ],
        f"{num_requests} prompts share the rows. host: until the call returned; device: between its events; wall: "
        "until it was done. again: after all the others.",
    )
    extra = [one.wall_ms - other.wall_ms for one, other in zip(first, second, strict=True)]
    bench.record.value(f"{name}: ms more the first time", statistics.median(extra))


def prompts_batch(engine: Any, num_rows: int, num_requests: int) -> RaggedBatch:
    """Return a batch of prompts from their first token on that share the rows, each with a row of logits."""
    spec = engine.spec
    blocks = -(-spec.max_seq_len // spec.tokens_per_block)
    table = np.arange(num_requests * blocks, dtype=np.int32).reshape(num_requests, blocks)
    tokens = np.random.default_rng(num_rows).integers(1, spec.vocab_size, spec.max_seq_len, dtype=np.int32)
    builder = BatchBuilder(table)
    for slot in range(num_requests):
        builder.add(slot, tokens, 0, num_rows // num_requests + (slot < num_rows % num_requests), 1)
    return builder.build()


def time_pass(engine: Any, batch: RaggedBatch) -> PassTime:
    start = time.perf_counter()
    engine.run_rows(batch)
    returned = time.perf_counter()
    engine.wait()
    done = time.perf_counter()
    return PassTime(1e3 * (returned - start), engine.pass_ms(), 1e3 * (done - start))
