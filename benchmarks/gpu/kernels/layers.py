"""Cases of the kernels between a layer's products, of mixtures of experts, and of draft steps.

Each op has a reference of the same arguments, which runs on copies of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.attention import BATCHES, BF16_ERROR, DRAFT_HIDDEN, TARGET_HIDDEN, relative_error
from benchmarks.gpu.kernels.case import KernelCase
from benchmarks.gpu.kernels.rows import MODES, issued_by_parts
from benchmarks.gpu.machine import num_copies
from faser_trtllm.core.decision import PruneRule
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.cuda import accept, copy_kv, gated_silu, prune_rows, quantize_rows, sample, take_step
from faser_trtllm.ops.cuda.experts import combine_rows, route_rows
from faser_trtllm.ops.cuda.experts.route_rows import Choice, Routes
from faser_trtllm.ops.prune_rows import PruneBatch, kept_rows
from faser_trtllm.ops.prune_rows import prune_rows_reference as prune_reference

if TYPE_CHECKING:
    from torch import Tensor

TARGET_INNER, DRAFT_INNER, VOCAB_SIZE = 14336, 4096, 128_256
EPS = 1e-5
# Experts, experts per row, hidden size, width of an expert: Qwen3-30B-A3B.
MIXTURE = (128, 8, 2048)
Make = Callable[["Source"], tuple[Any, ...]]
Functions = tuple[Callable[..., None], Callable[..., None]]


class Source:
    """Tensors on the machine's device, the same for equal seeds."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.device = bench.machine.device
        self._generator = bench.machine.generator(seed)

    def noise(self, *shape: int) -> Tensor:
        import torch

        return torch.randn(shape, generator=self._generator, device=self.device).bfloat16()

    def zeros(self, *shape: int, dtype: str = "int32") -> Tensor:
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def host(self, array: Any) -> Tensor:
        import torch

        return torch.from_numpy(array).to(self.device)

    def scaled_rows(self, num_rows: int, width: int) -> quantize_rows.ScaledRows:
        values = self.zeros(num_rows, width, dtype="float8_e4m3fn")
        return quantize_rows.ScaledRows(values, self.zeros(num_rows, 1, dtype="float32"))


def _case(
    bench: Bench,
    op: str,
    shape: str,
    stem: str,
    functions: Functions,
    make: Make,
    num_outputs: int,
    num_bytes: float,
    num_issued: float = 0.0,
) -> KernelCase:
    """Return the case of functions: launch and reference; the last num_outputs of make()'s arguments are compared."""
    machine, (launch, reference) = bench.machine, functions
    sets = [make(Source(bench, seed)) for seed in range(min(16, num_copies(num_bytes, machine.l2_bytes)))]
    launcher = machine.launcher(stem)

    def check() -> float:
        wanted = _on_host(sets[0])
        reference(*wanted)
        if launcher is None:
            return 0.0
        launch(launcher, *sets[0])
        machine.synchronize()
        outputs = zip(_tensors(_on_host(sets[0])[-num_outputs:]), _tensors(wanted[-num_outputs:]), strict=True)
        return max(_error(found, expected) for found, expected in outputs)

    calls = None
    if launcher is not None:
        calls = tuple(lambda arguments=arguments: launch(launcher, *arguments) for arguments in sets)
    return KernelCase(op, shape, check, calls, num_bytes, num_issued=num_issued)


def _on_host(value: Any) -> Any:
    """Return copies of tensors, in tuples and dataclasses, too."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, tuple):
        return tuple(map(_on_host, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _on_host(getattr(value, name)) for name in names})
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensors(each)
    elif dataclasses.is_dataclass(value):
        yield from _tensors(tuple(getattr(value, field.name) for field in dataclasses.fields(value)))


def _error(found: Tensor, wanted: Tensor) -> float:
    if wanted.is_floating_point():
        return relative_error(found, wanted) / BF16_ERROR
    return 0.0 if found.equal(wanted) else float("inf")


def gated_silu_cases(bench: Bench) -> Iterator[KernelCase]:
    for num_rows, inner, hidden_size in (
        ((3, 64, 64),)
        if bench.is_dry
        else (
            *((n * rows, TARGET_INNER, TARGET_HIDDEN) for n in BATCHES for rows in (1, 5)),
            *((n, DRAFT_INNER, DRAFT_HIDDEN) for n in BATCHES),
        )
    ):
        yield _silu_case(bench, num_rows, inner, hidden_size, is_scaled=False)
    for num_rows, inner, hidden_size in ((3, 64, 64),) if bench.is_dry else ((160, TARGET_INNER, TARGET_HIDDEN),):
        yield _silu_case(bench, num_rows, inner, hidden_size, is_scaled=True)


def silu_shape(num_rows: int, inner: int, hidden_size: int) -> str:
    """Return the shape's name in reports."""
    return f"{num_rows} rows of {inner}, hidden {hidden_size}"


def _silu_case(bench: Bench, num_rows: int, inner: int, hidden_size: int, *, is_scaled: bool) -> KernelCase:
    def make(source: Source) -> tuple[Any, ...]:
        out = source.scaled_rows(num_rows, inner) if is_scaled else source.noise(num_rows, inner)
        return (source.noise(num_rows, 2 * inner), source.noise(num_rows, hidden_size), None, EPS, out)

    def scaled_reference(gate_up: Tensor, hidden: Tensor, bias: None, eps: float, out: Any) -> None:
        whole = hidden.new_empty((num_rows, inner))
        gated_silu.gated_silu_reference(gate_up, hidden, bias, eps, whole)
        found = quantize_rows.quantize_rows(whole)
        out.values.copy_(found.values)
        out.scales.copy_(found.scales)

    functions: Functions = (gated_silu.launch, gated_silu.gated_silu_reference)
    if is_scaled:
        functions = (gated_silu.launch_scaled, scaled_reference)
    num_bytes = num_rows * ((5.0 if is_scaled else 6.0) * inner + 2.0 * hidden_size)
    shape = silu_shape(num_rows, inner, hidden_size) + (", to e4m3" if is_scaled else "")
    return _case(bench, "gated_silu", shape, "gated_silu", functions, make, 1, num_bytes)


def add_quantize_cases(bench: Bench) -> Iterator[KernelCase]:
    for num_rows, width in ((3, 64),) if bench.is_dry else ((160, TARGET_HIDDEN),):

        def make(source: Source, num_rows: int = num_rows, width: int = width) -> tuple[Any, ...]:
            return (source.noise(num_rows, width), source.noise(num_rows, width), source.scaled_rows(num_rows, width))

        def reference(x: Tensor, hidden: Tensor, out: quantize_rows.ScaledRows) -> None:
            found = quantize_rows.quantize_rows(hidden.add_(x))
            out.values.copy_(found.values)
            out.scales.copy_(found.scales)

        functions = (quantize_rows.launch_add, reference)
        shape = f"{num_rows} rows of {width}, added to the hidden rows"
        yield _case(bench, "quantize_rows", shape, "quantize_rows", functions, make, 2, 7.0 * num_rows * width)


def sample_cases(bench: Bench) -> Iterator[KernelCase]:
    """Yield a draft step's draws, as its graph launches them, without sample_advance."""
    for num_requests, vocab_size in ((3, 50),) if bench.is_dry else ((1, VOCAB_SIZE), (64, VOCAB_SIZE), (64, 4096)):
        for label in ("greedy", "seeded"):
            yield _sample_case(bench, num_requests, vocab_size, label)

    yield _advance_case(bench, 3 if bench.is_dry else 64)


NUM_KNOWN = 5  # tokens of each request before a draw


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
        sample.sample_reference(draws, logits, num_requests)
        tokens.copy_(draws.tokens)

    issued = 0.0 if vocab_size <= accept.PART_ENTRIES else num_requests * issued_by_parts(MODES[label], vocab_size)
    shape = f"{num_requests} requests, vocabulary {vocab_size}, {label}"
    num_bytes = 4.0 * num_requests * vocab_size
    return _case(bench, "sample", shape, "sample", (launch, reference), make, 1, num_bytes, issued)


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
        sample.advance_reference(draws, stop, num_requests)

    shape = f"{num_requests} requests, advance"
    return _case(bench, "sample", shape, "sample", (launch, reference), make, 2, 64.0 * num_requests)


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
    yield _case(bench, "prune_rows", shape, "prune_rows", functions, make, 2, float(scores.nbytes))


def take_step_cases(bench: Bench) -> Iterator[KernelCase]:
    for num_requests in (3,) if bench.is_dry else (1, 128):

        def make(source: Source, n: int = num_requests) -> tuple[Any, ...]:
            known = source.host(np.full(n, 500, np.int32))
            sizes = ((n,), (n,), (n,), (n,), (n + 1,), (n, 128))
            inputs = take_step.StepInputs(*(source.zeros(*size) for size in sizes))
            return (source.zeros(n), known, source.host(np.ones(n, np.int32)), source.zeros(n, 128), inputs)

        functions = (take_step.take_step, take_step.take_step_reference)
        yield _case(
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
    functions = (copy_kv.copy_kv, copy_kv.copy_kv_reference)
    yield _case(bench, "copy_kv", shape, "copy_kv", functions, make, 1, num_bytes)


def route_cases(bench: Bench) -> Iterator[KernelCase]:
    num_experts, top_k, width = (8, 2, 64) if bench.is_dry else MIXTURE
    choice = Choice(num_experts, top_k, over_all=False)
    for num_rows in (3,) if bench.is_dry else (1, 32, 160, 640):

        def make(source: Source, n: int = num_rows) -> tuple[Any, ...]:
            import torch

            routes = Routes.of(n, num_experts, choice, torch.device(source.device))
            used = source.host(np.full(1, n, np.int32))
            return (source.noise(n, width), source.noise(num_experts, width), used, choice, True, routes)

        num_bytes = 2.0 * width * (num_rows + num_experts) + 4.0 * num_rows * (2 * num_experts + 6 * top_k)
        shape = f"{num_rows} rows of {width}, {top_k} of {num_experts} experts"
        functions = (route_rows.launch, route_rows.route_rows_reference)
        yield _case(bench, "route_rows", shape, "route_rows", functions, make, 1, num_bytes)


def combine_cases(bench: Bench) -> Iterator[KernelCase]:
    num_experts, top_k, width = (8, 2, 64) if bench.is_dry else MIXTURE
    choice = Choice(num_experts, top_k, over_all=False)
    for num_rows in (3,) if bench.is_dry else (1, 32, 160, 640):

        def make(source: Source, n: int = num_rows) -> tuple[Any, ...]:
            import torch

            routes = Routes.of(n, num_experts, choice, torch.device(source.device))
            places = source.host(np.arange(n * top_k, dtype=np.int32).reshape(n, top_k))
            weights = source.noise(n, top_k).float()
            routes = dataclasses.replace(routes, places=places, weights=weights)
            used = source.host(np.full(1, n, np.int32))
            return (source.noise(n * top_k, width), routes, None, used, source.noise(n, width))

        shape = f"{num_rows} rows of {width}, {top_k} experts each"
        functions = (combine_rows.launch, combine_rows.combine_rows_reference)
        yield _case(
            bench, "combine_rows", shape, "combine_rows", functions, make, 1, 2.0 * num_rows * width * (top_k + 2)
        )
