"""The draft loop on the device: passes and draws as graphs of several steps, read by the host once at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.cuda_batch import DeviceBatch
from faser_trtllm.engine.cuda_draft_state import DraftState
from faser_trtllm.engine.cuda_graphs import GraphStore
from faser_trtllm.engine.cuda_law import draft_law, draw
from faser_trtllm.engine.cuda_ops import Ops
from faser_trtllm.engine.cuda_runtime import Runtime
from faser_trtllm.engine.cuda_sampling import has_edits
from faser_trtllm.engine.draft_loop import draft_loop
from faser_trtllm.engine.tensorrt_buckets import Buckets
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops import draft_stop
from faser_trtllm.ops.arrays import float32_at, int32_at
from faser_trtllm.ops.sample import MAX_MARGIN, draft_probs_row
from faser_trtllm.partition.green_context import GpuPartition

if TYPE_CHECKING:
    from torch import Tensor

Int32Array = npt.NDArray[np.int32]


class Passes(Protocol):
    """The engine, as the loop needs it."""

    partition: GpuPartition

    def run_rows(self, batch: RaggedBatch) -> None: ...

    def host_logits(self, num_rows: int) -> npt.NDArray[np.float32]: ...


class DraftLaws:
    """The laws that pending unseeded drafts were drawn from: fp32 [max_batch_size + 1, max_draft_len, vocab_size].

    The draft of slot s at a position is in row [s, position % max_draft_len]; the last slot takes what nobody reads.
    """

    def __init__(self, runtime: Runtime, max_batch_size: int, max_draft_len: int, vocab_size: int) -> None:
        import torch

        shape = (max_batch_size + 1, max_draft_len, vocab_size)
        self.tensor = torch.zeros(shape, dtype=torch.float32, device=runtime.device)

    def address(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        """Of each slot's laws, in device memory."""
        stride = self.tensor.stride(0) * self.tensor.element_size()
        return np.uint64(self.tensor.data_ptr()) + slots.astype(np.uint64) * np.uint64(stride)


class _Call(NamedTuple):
    """The requests that draft in one call, arrays [num_requests]: known tokens, of them committed and pending ones."""

    entries: npt.NDArray[np.void]
    slots: Int32Array
    known: Int32Array
    wanted: Int32Array
    num_tokens: Int32Array
    pending: Int32Array


class DraftLoop:
    """Engine.draft of a cuda engine.

    The first pass is the caller's batch, then come steps of one row per drafting request: draw, and run what was drawn.
    Steps are captured as graphs of 1, 2, 4, ... of them, so that a draft of n tokens is a few launches. Two things need
    the host between steps: a stop rule, which reads margins, and a request with penalties, bias, bad words or a minimum
    of tokens, whose whole batch is then drawn on the host, as ops/sample.py does.
    """

    def __init__(
        self,
        run_step: Callable[[int], None],
        ops: Ops,
        runtime: Runtime,
        batch: DeviceBatch,
        logits: Tensor,
        graphs: GraphStore,
        buckets: Buckets,
        spec: EngineSpec,
        laws: DraftLaws | None,
        max_draft_len: int,
    ) -> None:
        """run_step(rows): a pass over what is in `batch`, logits of row i in logits[i]. laws: see CudaEngine."""
        self.max_draft_len = max_draft_len
        self._run_step = run_step
        self._ops = ops
        self._runtime = runtime
        self._batch = batch
        self._logits = logits
        self._graphs = graphs
        self._buckets = buckets
        self._spec = spec
        self._laws_stay = laws is not None
        self._laws = laws or DraftLaws(runtime, spec.max_batch_size, max_draft_len, spec.vocab_size)
        self._state = DraftState(runtime, spec, max_draft_len, batch.max_blocks_per_seq)

    def capture(self, partition: str) -> None:
        """Capture draws and steps for every number of requests, on the current stream, which is this partition's."""
        sizes = [size for size in self._buckets.sizes() if size < self._spec.max_batch_size]
        for with_law in (False, True):
            for size in (*sizes, self._size(self._spec.max_batch_size)):
                self._state.clear()
                self._graphs.capture(("draw", size, with_law, partition), lambda b=size, w=with_law: self._draw(b, w))  # type: ignore[misc]
                for count in _powers(self.max_draft_len - 1):
                    self._state.clear()
                    self._graphs.capture(
                        ("steps", size, with_law, count, partition),
                        lambda b=size, w=with_law, n=count: self._steps(b, w, n),  # type: ignore[misc]
                    )

    def draft(
        self,
        engine: Passes,
        batch: RaggedBatch,
        sampling: npt.NDArray[np.void],
        num_tokens: Int32Array,
        num_drafts: Int32Array,
        num_new_drafts: Int32Array,
        max_draft_len: int,
        stop: DraftStop | None,
    ) -> Int32Array:
        n = batch.num_requests
        known = (num_tokens + num_drafts)[:n].astype(np.int32)
        wanted = num_new_drafts[:n].astype(np.int32)
        active = np.flatnonzero(wanted > 0)
        self._check(batch, active, known, num_drafts, wanted, max_draft_len)
        entries = sampling[batch.slots[active]]
        if any(map(has_edits, entries, known[active].tolist())):
            arguments = (batch, sampling, num_tokens, num_drafts, num_new_drafts, max_draft_len, stop)
            by_host = draft_loop(_host_forward(engine), self._spec.vocab_size, *arguments)
            self._keep_host_laws(entries, batch.slots[active], known[active], by_host[active], max_draft_len)
            return by_host
        rows = (batch.cu_rows[1:] - 1)[active].astype(np.int32)
        first = RaggedBatch(batch.slots, batch.cu_rows, batch.token_ids, batch.positions, rows, batch.block_table)
        drafted: Int32Array = np.zeros(n, np.int32)
        engine.run_rows(first)
        if active.size:
            call = _Call(
                entries, batch.slots[active], known[active], wanted[active], num_tokens[active], num_drafts[active]
            )
            table = batch.block_table[batch.slots[active]]
            self._state.upload(entries, call.slots, call.known, call.wanted, table)
            drafted[active] = self._loop(engine.partition.name, call, stop)
            if not self._laws_stay:
                self._give_laws_to_host(call, drafted[active], max_draft_len)
        return drafted

    def _loop(self, partition: str, call: _Call, stop: DraftStop | None) -> Int32Array:
        """Drafted tokens per drafting request; tokens, margins and candidates are in their host memory then."""
        size = self._size(call.slots.size)
        with_law = bool((call.entries["mode"] == native.SAMPLED).any())
        if not self._graphs.replay(("draw", size, with_law, partition)):
            self._draw(size, with_law)
        if stop is None:
            left = int(call.wanted.max()) - 1
            for count in reversed(_powers(left)):
                while left >= count:
                    if not self._graphs.replay(("steps", size, with_law, count, partition)):
                        self._steps(size, with_law, count)
                    left -= count
            return self._read(call, 0, int(call.wanted.max()))
        drafted = np.zeros(call.slots.size, np.int32)
        for step in range(int(call.wanted.max())):
            drafted += self._read(call, step, 1)
            goes_on = (drafted == step + 1) & (drafted < call.wanted)
            asked = np.flatnonzero(goes_on)
            margins = [
                draft_stop.pending_margins(call.entries[i], int(call.num_tokens[i]), int(call.pending[i] + drafted[i]))
                for i in asked
            ]
            goes_on[asked] = draft_stop.goes_on(stop, call.entries["mode"][asked].tolist(), margins)
            if not goes_on.any():
                break
            self._state.keep(goes_on, call.wanted - drafted)
            if not self._graphs.replay(("steps", size, with_law, 1, partition)):
                self._steps(size, with_law, 1)
        return drafted

    def _steps(self, size: int, with_law: bool, count: int) -> None:
        for _ in range(count):
            self._state.give_to(self._batch, size)
            self._run_step(size)
            self._draw(size, with_law)

    def _draw(self, size: int, with_law: bool) -> None:
        """Draw the next token of the first `size` requests from logits [size, vocab_size]."""
        import torch

        state, vocab_size = self._state, self._spec.vocab_size
        logits = self._logits[:size]
        # The test of a row where nothing is pending is a draw: the argmax, or the race that draft and target share.
        result: Any = state.result(size)
        self._ops.accept(
            state.entries[:size],
            state.iota[:size],
            logits,
            vocab_size,
            state.iota[: size + 1],
            state.known[:size],
            state.zeros[:size],
            0,
            result,
            state.verdicts[:size],
            None,
            state.leads[:size],
        )
        token, is_drawn = result.token_ids[:, 0], result.num_tokens > 0
        if with_law:
            law = draft_law(logits, state.law_parameters(size))
            drawn, has_law = draw(law)
            is_sampled = state.is_sampled[:size] > 0
            token, is_drawn = torch.where(is_sampled, drawn, token), torch.where(is_sampled, has_law, is_drawn)
            slot = torch.where(is_sampled & (state.remaining[:size] > 0), state.slots[:size], self._spec.max_batch_size)
            row = state.known[:size] % self.max_draft_len
            self._laws.tensor.index_put_((slot.long(), row.long()), law)
        best = logits.topk(min(NUM_CANDIDATES, vocab_size))
        if vocab_size > 1:
            margin = best.values[:, 0] - best.values[:, 1]
        else:
            margin = torch.full_like(best.values[:, 0], MAX_MARGIN)
        temperature = state.race_temperature[:size]
        margin = torch.where(temperature > 0, temperature * state.leads[:size], margin).clamp(max=MAX_MARGIN)
        candidates = torch.where(best.values > -torch.inf, best.indices, -1).int()
        state.record(size, token, is_drawn, margin, candidates)

    def _read(self, call: _Call, first: int, count: int) -> Int32Array:
        """Read `count` steps and write them to the requests' memory -> drafts that each request got of them."""
        tokens, margins, candidates = self._state.read(first, count, call.slots.size)
        is_drawn = tokens >= 0
        for i, entry in enumerate(call.entries):
            n = int(is_drawn[:, i].sum())
            if n == 0:
                continue
            start = int(call.known[i]) + first
            int32_at(int(entry["tokens"]), start + n)[start:] = tokens[:n, i]
            float32_at(int(entry["draft_margins"]), start + n)[start:] = margins[:n, i]
            kept = int32_at(int(entry["draft_candidates"]), (start + n) * NUM_CANDIDATES)
            if kept.size:
                mine = kept.reshape(-1, NUM_CANDIDATES)[start:]
                mine[:, : candidates.shape[2]], mine[:, candidates.shape[2] :] = candidates[:n, i], -1
                is_missing = (mine != tokens[:n, i, None]).all(1)
                mine[is_missing, -1] = tokens[:n, i][is_missing]
        counts: Int32Array = is_drawn.sum(0).astype(np.int32)
        return counts

    def _give_laws_to_host(self, call: _Call, drafted: Int32Array, max_draft_len: int) -> None:
        for i, entry in enumerate(call.entries):
            if entry["mode"] != native.SAMPLED:
                continue
            for position in range(int(call.known[i]), int(call.known[i] + drafted[i])):
                law = self._laws.tensor[int(call.slots[i]), position % self.max_draft_len]
                draft_probs_row(entry, position, self._spec.vocab_size, max_draft_len)[:] = law.cpu().numpy()

    def _keep_host_laws(
        self,
        entries: npt.NDArray[np.void],
        slots: Int32Array,
        known: Int32Array,
        drafted: Int32Array,
        max_draft_len: int,
    ) -> None:
        """Drafts drawn on the host: their laws to the device, if the test is there."""
        import torch

        if not self._laws_stay:
            return
        for entry, slot, start, count in zip(entries, slots.tolist(), known.tolist(), drafted.tolist(), strict=True):
            if entry["mode"] == native.SAMPLED:
                for position in range(start, start + count):
                    law = draft_probs_row(entry, position, self._spec.vocab_size, max_draft_len)
                    self._laws.tensor[slot, position % self.max_draft_len].copy_(torch.from_numpy(law))

    def _size(self, num_requests: int) -> int:
        return min(self._buckets.rows(num_requests), self._spec.max_batch_size)

    def _check(
        self,
        batch: RaggedBatch,
        active: npt.NDArray[np.intp],
        known: Int32Array,
        num_drafts: Int32Array,
        wanted: Int32Array,
        max_draft_len: int,
    ) -> None:
        last_rows = batch.cu_rows[1:][active] - 1
        if (batch.positions[last_rows] != known[active] - 1).any():
            raise InvalidArgumentError("a request that drafts must run the row of its last known token")
        if (num_drafts[active] + wanted[active] > max_draft_len).any():
            raise InvalidArgumentError(f"a request may have at most {max_draft_len} pending drafts")


def _powers(limit: int) -> list[int]:
    """1, 2, 4, ... up to limit."""
    return [1 << bit for bit in range(limit.bit_length())] if limit > 0 else []


def _host_forward(engine: Passes) -> Callable[[RaggedBatch], npt.NDArray[np.float32]]:
    def forward(batch: RaggedBatch) -> npt.NDArray[np.float32]:
        engine.run_rows(batch)
        return engine.host_logits(batch.logit_rows.size)

    return forward
