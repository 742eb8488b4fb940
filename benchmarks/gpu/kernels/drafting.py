"""Cases of the kernels of draft steps: draws, the next pass's inputs, and copies of branches' KV rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.acceptance import MODES, VOCAB_SIZE, issued_by_parts
from benchmarks.gpu.kernels.case import KernelCase
from benchmarks.gpu.kernels.op_case import Source, op_case
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.cuda import accept, copy_kv, sample, take_step
from lab.reference.cuda.copy_kv import copy_kv_reference
from lab.reference.cuda.sample import advance_reference, sample_reference
from lab.reference.cuda.take_step import take_step_reference

if TYPE_CHECKING:
    from torch import Tensor

NUM_KNOWN = 5  # tokens of each request before a draw


def sample_cases(bench: Bench) -> Iterator[KernelCase]:
    """Yield a draft step's draws, as its graph launches them, without sample_advance."""
    for num_requests, vocab_size in ((3, 50),) if bench.is_dry else ((1, VOCAB_SIZE), (64, VOCAB_SIZE), (64, 4096)):
        for label in ("greedy", "seeded"):
            yield _sample_case(bench, num_requests, vocab_size, label)

    yield _advance_case(bench, 3 if bench.is_dry else 64)


def _draws(source: Source, history: Tensor, vocab_size: int, label: str) -> sample.Draws:
    """Return the memory of a call of one step. history: the requests' tokens, which entries point at."""
    num_requests = history.shape[0]
    entries, shape = np.zeros(num_requests, SAMPLING_DTYPE), (1, num_requests)
    for name in ("temperature", "top_p", "repetition_penalty", "prompt_len"):
        entries[name] = 1
    entries["mode"], entries["key"] = MODES[label], np.arange(1, num_requests + 1)
    entries["tokens"] = _rows_of(history.data_ptr(), num_requests)
    return sample.Draws(
        source.host(entries.view(np.uint8).reshape(num_requests, -1)),
        source.host(np.full(num_requests, NUM_KNOWN, np.int32)),
        source.host(np.ones(num_requests, np.int32)),
        source.host(np.arange(num_requests, dtype=np.int32)),
        source.zeros(num_requests),
        source.zeros(1),
        source.zeros(*shape),
        source.zeros(*shape, dtype="float32"),
        source.zeros(*shape, NUM_CANDIDATES),
        source.zeros(num_requests, 1, vocab_size, dtype="float32"),
        workspace=source.zeros(max(1, accept.workspace_bytes(num_requests, vocab_size)), dtype="uint8"),
    )


def _rows_of(address: int, num_requests: int) -> Any:
    return address + 4 * NUM_KNOWN * np.arange(num_requests, dtype=np.uint64)


def _sample_case(bench: Bench, num_requests: int, vocab_size: int, label: str) -> KernelCase:
    def make(source: Source) -> tuple[Any, ...]:
        history = source.zeros(num_requests, NUM_KNOWN)
        draws = _draws(source, history, vocab_size, label)
        return (history, draws, source.noise(num_requests, vocab_size).float(), draws.tokens)

    def launch(launcher: Any, history: Tensor, draws: sample.Draws, logits: Tensor, tokens: Tensor) -> None:
        sample.sample(launcher, draws, logits, num_requests)

    def reference(history: Tensor, draws: sample.Draws, logits: Tensor, tokens: Tensor) -> None:
        table: Any = draws.entries.numpy().reshape(-1).view(SAMPLING_DTYPE)
        table["tokens"] = _rows_of(history.data_ptr(), num_requests)
        sample_reference(draws, logits, num_requests)
        tokens.copy_(draws.tokens)

    issued = 0.0 if vocab_size <= accept.PART_ENTRIES else num_requests * issued_by_parts(MODES[label], vocab_size)
    shape = f"{num_requests} requests, vocabulary {vocab_size}, {label}"
    num_bytes = 4.0 * num_requests * vocab_size
    return op_case(bench, "sample", shape, "sample", (launch, reference), make, 1, num_bytes, issued)


def _advance_case(bench: Bench, num_requests: int) -> KernelCase:
    def make(source: Source) -> tuple[Any, ...]:
        stop = sample.StopTables(
            source.zeros(num_requests),
            source.zeros(4, 3, 5, dtype="float32"),
            source.zeros(5, dtype="float32"),
            source.zeros(num_requests + 1, dtype="float32"),
            source.zeros(num_requests),
            source.zeros(num_requests, dtype="float64"),
            source.zeros(1),
        )
        history = source.zeros(num_requests, NUM_KNOWN)
        return (history, _draws(source, history, 50, "greedy"), stop)

    def launch(launcher: Any, history: Tensor, draws: sample.Draws, stop: sample.StopTables) -> None:
        sample.advance(launcher, draws, stop, num_requests)

    def reference(history: Tensor, draws: sample.Draws, stop: sample.StopTables) -> None:
        advance_reference(draws, stop, num_requests)

    shape = f"{num_requests} requests, advance"
    return op_case(bench, "sample", shape, "sample", (launch, reference), make, 2, 64.0 * num_requests)


def take_step_cases(bench: Bench) -> Iterator[KernelCase]:
    for num_requests in (3,) if bench.is_dry else (1, 128):

        def make(source: Source, n: int = num_requests) -> tuple[Any, ...]:
            known = source.host(np.full(n, 500, np.int32))
            sizes = ((n,), (n,), (n,), (n,), (n + 1,), (n, 128))
            inputs = take_step.StepInputs(*(source.zeros(*size) for size in sizes))
            return (source.zeros(n), known, source.host(np.ones(n, np.int32)), source.zeros(n, 128), inputs)

        functions = (take_step.take_step, take_step_reference)
        yield op_case(
            bench, "take_step", f"{num_requests} requests", "take_step", functions, make, 1, 1024.0 * num_requests
        )


def copy_kv_cases(bench: Bench) -> Iterator[KernelCase]:
    planes, heads, head_dim = (4, 2, 64) if bench.is_dry else (64, 8, 128)
    num_copies_made, tokens = 2, 16

    def make(source: Source) -> tuple[Any, ...]:
        copies = np.array([[0, 1], [2, 3], [0, 0], [tokens, tokens]], np.int32)
        return (source.host(copies), source.noise(planes, 4, heads, 32, head_dim))

    num_bytes = 4.0 * num_copies_made * tokens * planes * heads * head_dim
    shape = f"{num_copies_made} copies of {tokens} tokens, {planes // 2} layers, {heads} heads of {head_dim}"
    functions = (copy_kv.copy_kv, copy_kv_reference)
    yield op_case(bench, "copy_kv", shape, "copy_kv", functions, make, 1, num_bytes, is_exact=True)
