"""Cases of the kernels between two segments: scores of early exits, which rows stay, and their move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.acceptance import VOCAB_SIZE
from benchmarks.gpu.kernels.case import KernelCase
from benchmarks.gpu.kernels.op_case import Source, op_case
from faser_trtllm.core.decision import PruneRule
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.ops.cuda import compact_rows, early_exit, prune_rows
from faser_trtllm.ops.prune_rows import PruneBatch, kept_rows
from faser_trtllm.ops.prune_rows import prune_rows_reference as prune_reference
from lab.reference.cuda.compact_rows import compact_rows_reference
from lab.reference.cuda.early_exit import early_exit_reference

if TYPE_CHECKING:
    from torch import Tensor

MAX_SEQ_LEN = 2048
EPS = 1e-5


def early_exit_cases(bench: Bench) -> Iterator[KernelCase]:
    sizes = ((3, 64, 50),) if bench.is_dry else ((8, 4096, VOCAB_SIZE), (64, 4096, VOCAB_SIZE))
    for num_rows, hidden_size, vocab_size in sizes:
        yield _early_exit_case(bench, num_rows, hidden_size, vocab_size)


def _early_exit_case(bench: Bench, num_rows: int, hidden_size: int, vocab_size: int) -> KernelCase:
    """Return the case; ranks and gaps follow from scores, whose products are summed in a different order."""
    common = Source(bench, bench.options.seed)
    hidden, norm, head = (common.noise(*size, hidden_size) for size in ((num_rows,), (), (vocab_size,)))
    rows, places = common.host(np.arange(num_rows, dtype=np.int32)), common.zeros(num_rows)

    def make(source: Source) -> tuple[Any, ...]:
        rank, gap = source.zeros(num_rows), source.zeros(num_rows, dtype="float32")
        scores = source.zeros(num_rows, NUM_CANDIDATES, dtype="float32")
        candidates = source.integers(vocab_size, num_rows, NUM_CANDIDATES)
        return (hidden, rows, norm, head, candidates, places, rank, gap, scores)

    def launch(launcher: Any, *arguments: Any) -> None:
        inputs, (rank, gap, scores) = arguments[:6], arguments[6:]
        whole: Any = (launcher, *inputs, EPS, scores, rank, gap)
        early_exit.early_exit(*whole)

    def reference(*arguments: Any) -> None:
        host = (each.float().numpy() if each.is_floating_point() else each.numpy() for each in arguments[:6])
        whole: Any = (*host, EPS)
        arguments[8].numpy()[:] = early_exit_reference(*whole)[0]

    shape = f"{num_rows} rows x {NUM_CANDIDATES} candidates, hidden {hidden_size}"
    num_bytes = 2.0 * num_rows * NUM_CANDIDATES * hidden_size
    return op_case(bench, "early_exit", shape, "early_exit", (launch, reference), make, 1, num_bytes)


def compact_rows_cases(bench: Bench) -> Iterator[KernelCase]:
    for num_requests, hidden_size in ((3, 64),) if bench.is_dry else ((64, 4096), (256, 4096)):
        yield _compact_case(bench, num_requests, hidden_size)


def _compact_case(bench: Bench, num_requests: int, hidden_size: int) -> KernelCase:
    rows_each = 5
    num_rows = num_requests * rows_each
    kept_each = np.arange(num_requests) % rows_each + 1
    listed = np.concatenate([rows_each * i + np.arange(n) for i, n in enumerate(kept_each)]).astype(np.int32)
    rows = np.full(-(-listed.size // 16) * 16, -1, np.int32)
    rows[: listed.size] = listed
    positions = np.tile(np.arange(100, 100 + rows_each, dtype=np.int32), num_requests)
    cu_q_lens = np.arange(num_requests + 1, dtype=np.int32) * rows_each
    host = (positions, rows, cu_q_lens, np.full(num_requests, 100 + rows_each, np.int32))

    def make(source: Source) -> tuple[Any, ...]:
        sizes = (rows.size, rows.size, num_requests + 1, num_requests)
        kept = (source.zeros(rows.size, hidden_size, dtype="bfloat16"), *map(source.zeros, sizes))
        return (source.noise(num_rows, hidden_size), *map(source.host, host), *kept)

    def launch(launcher: Any, *arguments: Any) -> None:
        whole: Any = (launcher, *arguments[:5], MAX_SEQ_LEN, compact_rows.CompactedRows(*arguments[5:]))
        compact_rows.compact_rows(*whole)

    def reference(hidden: Tensor, *arguments: Tensor) -> None:
        whole: Any = (hidden.float().numpy(), *(each.numpy() for each in arguments[:4]), MAX_SEQ_LEN)
        for found, array in zip(arguments[4:], compact_rows_reference(*whole), strict=True):
            found.copy_(found.new_tensor(array))

    shape = f"{num_rows} rows of {num_requests} requests to {listed.size} in {rows.size}, hidden {hidden_size}"
    num_bytes = 4.0 * rows.size * hidden_size
    return op_case(bench, "compact_rows", shape, "compact_rows", (launch, reference), make, 5, num_bytes, is_exact=True)


def prune_rows_cases(bench: Bench) -> Iterator[KernelCase]:
    """Yield a boundary where each request has four drafts."""
    num_requests = 3 if bench.is_dry else 64
    rng = np.random.default_rng(bench.options.seed)
    scores = rng.standard_normal((4 * num_requests, NUM_CANDIDATES)).astype(np.float32)
    places, before = np.zeros(4 * num_requests, np.int32), np.ones(4 * num_requests, np.float32)
    starts, rule = 5 * np.arange(num_requests, dtype=np.int32), PruneRule(before, -0.5, -0.8, 1.1, 0.2, 0.4)
    batch = PruneBatch(
        starts, np.full(num_requests, 5), np.zeros_like(scores, np.int32), places, 5 * num_requests, rule
    )

    def make(source: Source) -> tuple[Any, ...]:
        cu_drafts = 4 * np.arange(num_requests + 1, dtype=np.int32)
        arrays = (scores, places, before, cu_drafts, starts, rule.weights())
        outputs = (source.zeros(num_requests), source.zeros(5 * num_requests))
        return (*map(source.host, arrays), 5 * num_requests, *outputs)

    def reference(*arguments: Any) -> None:
        kept, rows = arguments[-2:]
        wanted = prune_reference(scores, batch)
        listed = kept_rows(batch, wanted)
        kept.numpy()[:], rows.numpy()[:] = wanted, -1
        rows.numpy()[: listed.size] = listed

    shape = f"{5 * num_requests} rows of {num_requests} requests"
    functions = (prune_rows.prune_rows, reference)
    yield op_case(bench, "prune_rows", shape, "prune_rows", functions, make, 2, float(scores.nbytes))
