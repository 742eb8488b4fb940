"""Gain of speed by quantization: decode steps of few rows and a prefill, interleaved with bf16."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.quantization.quality import opened
from benchmarks.quantization.random_model import MAX_SEQ_LEN, random_config, scheme_named, write_random_engine
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.partition.core_set import CoreSet

PREFILL = 512
CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Cell:
    """A scheme at a number of rows. cpu_ms: median of CPU time on one thread.

    ratio: median over the rounds of bf16's time over the scheme's in the same round.
    """

    scheme: str
    num_rows: int
    cpu_ms: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Results. file_bytes: size of the engine files by scheme."""

    file_bytes: dict[str, int]
    cells: list[Cell]


def measure_speed(schemes: Sequence[str], rows: Sequence[int], rounds: int, sizes: tuple[int, int, int, int]) -> Speed:
    """Measure CPU time on one thread, which other work on the machine disturbs least.

    sizes: layers, hidden_size, intermediate_size, vocab_size. A prefill of 512 rows has one row of logits.
    """
    config = random_config(*sizes)
    names = ("none", *schemes)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        core_set = stack.enter_context(CoreSet(num_threads=1))
        engines, batches, sizes_of = {}, {}, {}
        for name in names:
            path = Path(folder) / f"{name}.engine"
            write_random_engine(path, config, scheme_named(name))
            sizes_of[name] = path.stat().st_size
            engine, builder = stack.enter_context(opened(path, core_set, MAX_SEQ_LEN))
            engines[name] = engine
            tokens = np.random.default_rng(2).integers(0, config.vocab_size, MAX_SEQ_LEN).astype(np.int32)
            for num_rows in rows:
                first = 0 if num_rows == PREFILL else CONTEXT
                builder.clear()
                builder.add(0, tokens, first, first + num_rows, 1 if num_rows == PREFILL else num_rows)
                batches[name, num_rows] = _copied(builder.build())
            builder.clear()
            builder.add(0, tokens, 0, CONTEXT, 1)
            engine.forward(builder.build())
        taken: dict[tuple[str, int], list[float]] = {key: [] for key in batches}
        for _ in range(rounds):
            for num_rows in rows:
                for name in names:
                    taken[name, num_rows].append(_cpu_ms(engines[name], batches[name, num_rows]))
    cells = []
    for num_rows in rows:
        for name in names:
            times, base = taken[name, num_rows], taken["none", num_rows]
            ratio = statistics.median(b / t for b, t in zip(base, times, strict=True))
            cells.append(Cell(name, num_rows, statistics.median(times), ratio))
    return Speed(sizes_of, cells)


def _copied(batch: RaggedBatch) -> RaggedBatch:
    return RaggedBatch(
        batch.slots.copy(),
        batch.cu_rows.copy(),
        batch.token_ids.copy(),
        batch.positions.copy(),
        batch.logit_rows.copy(),
        batch.block_table,
    )


def _cpu_ms(engine: CpuEngine, batch: RaggedBatch) -> float:
    start = time.thread_time()
    engine.forward(batch)
    return (time.thread_time() - start) * 1e3
