"""GPU engines on a device that computes nothing, to measure the host's part of their calls.

The device's memory is the host's, so copies on the CPU stand in for CUDA's. Passes, draft steps and rejection sampling
run in the device's place, and HostClock leaves them out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.dry_gpu import HostRuntime
from benchmarks.gpu.reference_ops import ReferenceOps
from benchmarks.host.null_engines import DRAFTED, RandomLogits
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.gpu.batch import DeviceBatch
from faser_trtllm.engine.gpu.decoder import Bounds, OneSegmentDecoder, Placement
from faser_trtllm.engine.gpu.engine import GpuEngine
from faser_trtllm.engine.gpu.limits import GpuLimits
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.runtime import Replay, Runtime, Work
from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs
from faser_trtllm.ops.cuda.sample import Draws, StopTables
from faser_trtllm.ops.cuda.take_step import StepInputs
from faser_trtllm.partition.green_context import GpuPartition

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WHOLE = GpuPartition("whole", 0, 1)
_CERTAIN = 1e4
"""A logit so far above 0 that every way of sampling chooses its token."""


class HostClock:
    """CPU seconds of this process, without those in which it played the device.

    idle_s: seconds in which the device had no work; launched work counts as longer than the host's work after it.
    """

    def __init__(self) -> None:
        self.idle_s = 0.0
        self._device_s = 0.0
        self._idle_from_s: float | None = None

    def now_s(self) -> float:
        return time.process_time() - self._device_s

    def clear(self) -> None:
        """Reset idle_s."""
        self.idle_s = 0.0
        if self._idle_from_s is not None:
            self._idle_from_s = self.now_s()

    def launched(self) -> None:
        """Record that the device has work."""
        if self._idle_from_s is not None:
            self.idle_s += self.now_s() - self._idle_from_s
            self._idle_from_s = None

    def awaited(self) -> None:
        """Record that the device has finished its work."""
        self._idle_from_s = self.now_s()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock while the process plays the device; may be nested."""
        begun_s = self.now_s()
        try:
            yield
        finally:
            self._device_s += self.now_s() - begun_s


@dataclass(frozen=True)
class GpuEngines:
    """Parts of an executor and its GpuRejectionSampler. draft, draft_probs: None without a draft model."""

    target: GpuEngine
    draft: GpuEngine | None
    ops: Ops
    draft_probs: DeviceDraftProbs | None


def open_gpu_engines(
    spec: EngineSpec,
    max_draft_len: int,
    clock: HostClock,
    stack: ExitStack,
    *,
    drafts: bool,
    acceptance: float,
    seed: int,
) -> GpuEngines:
    """Open the target and, with `drafts`, the draft, and capture their graphs; the stack closes them.

    Until then torch has one thread, since the clock counts all of them. spec: of both, with one segment. The target's
    tokens are those of a NullEngine with the same acceptance and seed. The draft always drafts DRAFTED, without the
    stop rule.
    """
    import torch

    stack.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(1)
    ops = _DeviceOps(clock)
    draft_probs = (
        DeviceDraftProbs(HostRuntime(), WHOLE, spec.max_batch_size, max_draft_len, spec.vocab_size) if drafts else None
    )

    def open_one(role: str) -> tuple[GpuEngine, _Decoder]:
        is_draft = role == "draft"
        limits = GpuLimits(
            num_blocks=spec.num_blocks,
            tokens_per_block=spec.tokens_per_block,
            max_batch_size=spec.max_batch_size,
            max_num_tokens=spec.max_num_tokens,
            max_seq_len=spec.max_seq_len,
            max_logit_rows=spec.max_batch_size * (1 + max_draft_len),
            max_draft_len=max_draft_len if is_draft else 0,
        )
        sizes = {"vocab_size": spec.vocab_size, "num_layers": spec.num_layers, "max_seq_len": spec.max_seq_len}
        opened = limits.spec(sizes, spec.segments)
        runtime: Runtime = _DeviceRuntime(clock)
        decoder = _Decoder(DeviceBatch(runtime, opened), opened, clock)
        probs = draft_probs if is_draft else None
        place = Placement(ops, runtime, WHOLE)
        engine = GpuEngine(decoder, opened, place, limits, draft_probs=probs)
        stack.callback(engine.close)
        engine.capture_graphs((WHOLE,))
        return engine, decoder

    target, decoder = open_one("target")
    decoder.random_logits = RandomLogits(spec.max_num_tokens, spec.vocab_size, acceptance, seed)
    draft = open_one("draft")[0] if drafts else None
    if draft_probs is not None:
        draft_probs.tensor[..., DRAFTED] = 1.0
    return GpuEngines(target, draft, ops, draft_probs)


class _DeviceRuntime(HostRuntime):
    """A runtime whose graphs run on the device; events do nothing, since times come from a cost table.

    wait() is for results only: a copy to the device ends long before its source is filled again.
    """

    def __init__(self, clock: HostClock) -> None:
        super().__init__()
        self._clock = clock

    def capture(self, work: Work) -> Replay:
        return self._on_device(super().capture(work))

    def capture_loop(self, begin: Work, step: Work, going: torch.Tensor) -> Replay:
        return self._on_device(super().capture_loop(begin, step, going))

    def wait(self) -> None:
        self._clock.awaited()

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def ms_between(self, begin: Any, end: Any) -> float:
        return 0.0

    def _on_device(self, replay: Replay) -> Callable[[], None]:
        def run() -> None:
            self._clock.launched()
            with self._clock.stopped():
                replay()

        return run


class _Decoder(OneSegmentDecoder):
    """A Decoder without layers. random_logits: the logits of its passes; None leaves them unchanged."""

    weight_bytes = 0
    has_kv = True

    def __init__(self, batch: DeviceBatch, spec: EngineSpec, clock: HostClock) -> None:
        import torch

        self.batch = batch
        self.random_logits: RandomLogits | None = None
        self._clock = clock
        self._max_seq_len = spec.max_seq_len
        self._hidden = torch.zeros((spec.max_num_tokens, 1))

    def run(self, rows: int, first: int, last: int, bounds: Bounds) -> None:
        self._clock.launched()

    def write_logits(self, logits: Tensor) -> None:
        if self.random_logits is None:
            return
        with self._clock.stopped():
            logits.numpy()[:] = _CERTAIN * self.random_logits.of_pass(logits.shape[0])

    def step(self, rows: int, bounds: Bounds, logits: Tensor) -> None: ...

    def close(self) -> None: ...


class _DeviceOps(ReferenceOps):
    """Ops that draft DRAFTED with a margin of 0 and use the native library's rejection sampling."""

    def __init__(self, clock: HostClock) -> None:
        super().__init__()
        self.accept = clock.stopped()(self.accept)
        self.sample = clock.stopped()(_sample)
        self.advance = clock.stopped()(_advance)
        self.take_step = _take_step


def _sample(
    draws: Draws, logits: Tensor, num_requests: int, edited_logits: Tensor | None = None, *, part_entries: int = 0
) -> None:
    is_drawing = draws.remaining.numpy()[:num_requests] > 0
    if is_drawing.any():
        draws.tokens.numpy()[int(draws.step), :num_requests][is_drawing] = DRAFTED


def _advance(draws: Draws, stop: StopTables, num_requests: int, *, has_history: bool = False) -> None:
    known, remaining = (values.numpy()[:num_requests] for values in (draws.known, draws.remaining))
    is_drawn = remaining > 0
    known += is_drawn
    remaining -= is_drawn
    draws.step.add_(1)
    stop.num_going[0] = int((remaining > 0).sum())


def _take_step(newest: Tensor, known: Tensor, remaining: Tensor, table: Tensor, inputs: StepInputs) -> None: ...
