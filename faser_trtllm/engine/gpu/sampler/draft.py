"""The draft loop on the device: one graph draws tokens, runs passes and ends itself; the host reads only at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.engine.base import DraftBatch, EngineSpec
from faser_trtllm.engine.buckets import Buckets
from faser_trtllm.engine.gpu.batch import PassInputs
from faser_trtllm.engine.gpu.graphs import GraphStore
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.runtime import Runtime, Work
from faser_trtllm.engine.gpu.sampler.call import DraftCall
from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs
from faser_trtllm.engine.gpu.sampler.draft_state import DraftState
from faser_trtllm.engine.gpu.sampler.pending import PendingSteps
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.transfer.store_drafts import DraftStore
from faser_trtllm.partition.green_context import GpuPartition

if TYPE_CHECKING:
    from torch import Tensor

Int32Array = npt.NDArray[np.int32]


class Passes(Protocol):
    """The part of the engine that the loop uses."""

    partition: GpuPartition

    def run_rows(self, batch: RaggedBatch) -> None: ...

    def run_step(self, rows: int) -> None: ...


class DraftLoop:
    """Implements Engine.draft for GPU engines.

    The first pass is the caller's batch. Then the loop draws a token for each drafting request. While any request
    continues, a step runs the newest tokens, one row per request, and draws the next ones. All of it is one launch of a
    graph with a loop, which ends when every request has reached its limit or was stopped by the rule. Without graphs,
    or if the driver does not support loops, the host launches steps one by one, and with a stop rule it reads after
    each how many requests continue.

    A head runs its pending drafts between the first pass and the first draw (PendingSteps). A block drafter has no
    pending drafts: it runs whole blocks there, and its steps move to the next place's logits. If a request has
    penalties, bias, bad words or min_tokens, only the passes are graphs. Guides restrict verification, not drafts.
    """

    def __init__(
        self,
        run_step: Callable[[int], None],
        ops: Ops,
        runtime: Runtime,
        batch: PassInputs,
        logits: Tensor,
        graphs: GraphStore,
        buckets: Buckets,
        spec: EngineSpec,
        draft_probs: DeviceDraftProbs | None,
        max_draft_len: int,
        *,
        keeps_runners_up: bool = False,
    ) -> None:
        """run_step(rows): runs a pass over the contents of `batch` and leaves row i's logits in logits[i]. draft_probs:
        see GpuEngine. keeps_runners_up: also keep each draft's runner-up, for branches."""
        import torch

        self.max_draft_len = max_draft_len
        self._run_step = run_step
        self._ops = ops
        self._runtime = runtime
        self._batch = batch
        self._logits = logits
        self._graphs = graphs
        self._buckets = buckets
        self._spec = spec
        probs = (
            torch.zeros((spec.max_batch_size, max_draft_len, spec.vocab_size), device=runtime.device)
            if draft_probs is None
            else draft_probs.tensor
        )
        self._store = DraftStore(spec.max_batch_size)
        # Scratch for edited logits, before graphs are captured, which take half of what is free.
        self._edited = torch.zeros((spec.max_batch_size, spec.vocab_size), device=runtime.device)
        blocks = -(-spec.max_seq_len // spec.tokens_per_block)
        # Block drafters need none: they only draft for requests without pending drafts.
        self._pending = PendingSteps(runtime, spec.max_batch_size, max_draft_len) if spec.is_head else None
        self._state = DraftState(runtime, spec, max_draft_len, blocks, probs, keeps_runners_up)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of requests that calls are padded to."""
        every = (*self._buckets.sizes(), *self._buckets.large_sizes())
        return (*(size for size in every if size < self._spec.max_batch_size), self._size(self._spec.max_batch_size))

    def capture(self, partition: str) -> None:
        """Capture draws and steps for every number of requests on the current stream, which must be the partition's."""
        for size in self.sizes:
            if self._spec.reads_target:
                self._state.clear()
                self._graphs.capture(("step", size, partition), functools.partial(self._run_step, size))
            self._state.clear()
            draw, step = functools.partial(self._draw, size), functools.partial(self._draw_next, size)
            if not self._graphs.capture_loop(("drafts", size, partition), draw, step, self._state.stop.num_going):
                self._graphs.capture(("draw", size, partition), draw)
                self._graphs.capture(("draw next", size, partition), step)

    def draft(self, engine: Passes, draft_batch: DraftBatch) -> Int32Array:
        batch, sampling, max_draft_len = draft_batch.batch, draft_batch.sampling, draft_batch.max_draft_len
        num_tokens, num_drafts = draft_batch.num_tokens, draft_batch.num_drafts
        n = batch.num_requests
        known = (num_tokens + num_drafts)[:n].astype(np.int32)
        wanted = draft_batch.num_new_drafts[:n].astype(np.int32)
        active = np.flatnonzero(wanted > 0)
        run = known if self._pending is None else num_tokens[:n]
        self._check(batch, active, run, num_drafts, wanted, max_draft_len)
        rows = (batch.cu_rows[1:] - 1)[active].astype(np.int32)
        first = RaggedBatch(batch.slots, batch.cu_rows, batch.token_ids, batch.positions, rows, batch.block_table)
        drafted: Int32Array = np.zeros(n, np.int32)
        engine.run_rows(first)
        if active.size:
            slots = batch.slots[active]
            call = DraftCall(
                sampling,
                slots,
                known[active],
                wanted[active],
                num_tokens[active],
                num_drafts[active],
                sampling["mode"][slots],
            )
            num_blocks = -(-int((call.known + call.wanted).max()) // self._spec.tokens_per_block)
            blocks = batch.block_table[:, :num_blocks][slots]
            is_edited = self._state.upload(call, blocks, draft_batch.stop)
            if self._pending is not None:
                size = self._size(slots.size)
                for step in self._pending.upload(call):
                    self._state.give_tokens(self._batch, self._ops, size, step)
                    engine.run_step(size)
            if is_edited:
                self._edited_loop(engine, call, draft_batch.stop)
            else:
                self._loop(engine.partition.name, call, draft_batch.stop)
            read = self._state.read(int(call.wanted.max()))
            drafted[active] = self._store.store(sampling, slots, call.known, *read)
        return drafted

    def _loop(self, partition: str, call: DraftCall, stop: DraftStop | None) -> None:
        """Draw the drafts of a call until its stop rule ends it."""
        size = self._size(call.slots.size)

        def run(name: str, work: Callable[[int], None]) -> None:
            if not self._graphs.replay((name, size, partition)):
                work(size)

        if not self._graphs.replay(("drafts", size, partition)):
            self._one_by_one(call, stop, lambda: run("draw", self._draw), lambda: run("draw next", self._draw_next))

    def _edited_loop(self, engine: Passes, call: DraftCall, stop: DraftStop | None) -> None:
        """Draw like _loop(), with edited logits; only the passes are graphs."""
        size, edited = self._size(call.slots.size), self._edited

        def step() -> None:
            self._state.give_to(self._batch, self._ops, size)
            engine.run_step(size)
            self._draw(size, edited)

        self._one_by_one(call, stop, lambda: self._draw(size, edited), step)

    def _one_by_one(self, call: DraftCall, stop: DraftStop | None, draw: Work, step: Work) -> None:
        draw()
        for _ in range(1, int(call.wanted.max())):
            # A step that no request needs costs more than waiting for one number.
            if stop is not None and not self._state.num_going():
                break
            step()

    def _draw_next(self, size: int) -> None:
        self._state.give_to(self._batch, self._ops, size)
        self._run_step(size)
        self._draw(size)

    def _draw(self, size: int, edited: Tensor | None = None) -> None:
        """Draw the next token of the first `size` requests from logits [size, vocab_size]."""
        draws, logits = self._state.draws, self._logits[:size]
        self._ops.sample(draws, logits, size, edited)
        self._ops.advance(draws, self._state.stop, size, has_history=edited is not None)

    def _size(self, num_requests: int) -> int:
        return min(self._buckets.rows(num_requests), self._spec.max_batch_size)

    def _check(
        self,
        batch: RaggedBatch,
        active: npt.NDArray[np.intp],
        run: Int32Array,
        num_drafts: Int32Array,
        wanted: Int32Array,
        max_draft_len: int,
    ) -> None:
        """Raise InvalidArgumentError for an invalid call. run: the token count that the rows of each request must
        reach."""
        if self._spec.block_size and num_drafts[active].any():
            raise InvalidArgumentError("a block drafter drafts for requests without pending drafts; verify those first")
        last_rows = batch.cu_rows[1:][active] - 1
        if (batch.positions[last_rows] != run[active] - 1).any():
            last = "known" if self._pending is None else "committed"
            raise InvalidArgumentError(f"a request that drafts must run the row of its last {last} token")
        if (num_drafts[active] + wanted[active] > max_draft_len).any():
            raise InvalidArgumentError(f"a request may have at most {max_draft_len} pending drafts")
