"""The engine of every GPU backend: one model's passes, graphs, drafting and logits on the device.

A Decoder computes the layers: torch (engine/cuda) or compiled plans (engine/tensorrt, not yet run on a GPU). All but
streams, events, graphs and launches is tested on the CPU, with the kernels' references and with the kernels, emulated
(tests/engine/cuda).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.closing import Closing
from faser_trtllm.engine.base import DraftBatch, EngineSpec
from faser_trtllm.engine.buckets import Buckets
from faser_trtllm.engine.gpu.boundary import Boundary
from faser_trtllm.engine.gpu.decoder import Bounds, Decoder, Placement
from faser_trtllm.engine.gpu.graphs import GraphStore
from faser_trtllm.engine.gpu.limits import GpuLimits, most_logit_rows
from faser_trtllm.engine.gpu.sampler.draft import DraftLoop
from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs
from faser_trtllm.engine.gpu.sampler.logits import DeviceLogits
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from faser_trtllm.ops.prune_rows import HostPruning, PruneBatch
from faser_trtllm.partition.green_context import GpuPartition

if TYPE_CHECKING:
    from torch import Tensor

Int32Array = npt.NDArray[np.int32]

WHOLE_PASS = -1
"""Stands for all segments in place of a segment's number."""


class GpuEngine(HostPruning, Closing):
    """Engine (engine/base.py) over a decoder in device memory. Not thread-safe: one caller at a time, on any thread.

    A pass is padded to a bucket. A pass of more than max_graph_rows rows computes its logits separately, padded to a
    bucket too. Inputs, hidden rows, caches and outputs have fixed addresses, and a replayed graph allocates nothing;
    work without a graph allocates from torch's caching allocator.
    """

    def __init__(
        self,
        decoder: Decoder,
        spec: EngineSpec,
        place: Placement,
        limits: GpuLimits,
        *,
        draft_probs: DeviceDraftProbs | None = None,
        graphs: GraphStore | None = None,
    ) -> None:
        """decoder: made at `place`, closed with the engine. draft_probs: memory for the distributions of unseeded
        drafts, which the rejection sampler reads; None: the engine's own. graphs: an empty store; None: a new one."""
        import torch

        ops, self.runtime, self.partition = place.ops, place.runtime, place.partition
        runtime = place.runtime
        self._spec = spec
        self._decoder = decoder
        self._batch = decoder.batch
        self._max_logit_rows = most_logit_rows(spec)
        graph_rows = max(1, min(limits.max_graph_rows, limits.max_num_tokens, self._max_logit_rows))
        self._buckets = Buckets(graph_rows, limits.max_num_tokens, is_coarse=decoder.has_fixed_shapes)
        runtime.wait()  # other streams do not wait for the default stream, which may still fill weights and draft_probs
        with runtime.on(place.partition), torch.no_grad():
            self.graphs = GraphStore(runtime, limits.graph_bytes) if graphs is None else graphs
            self.sizes_without_graph: set[int] = set()  # row counts for which the budget allowed no graph
            logits = (self._max_logit_rows, spec.vocab_size)
            self._logits = torch.zeros(logits, dtype=torch.float32, device=runtime.device)
            self._copies = Staging(runtime, 4 * spec.max_num_branches) if spec.max_num_branches else None
            self._boundary = Boundary(decoder, ops, runtime, self._buckets, spec)
            self._draft_loop = (
                DraftLoop(
                    self._step,
                    ops,
                    runtime,
                    self._batch,
                    self._logits,
                    self.graphs,
                    self._buckets,
                    self._spec,
                    draft_probs,
                    limits.max_draft_len,
                    keeps_runners_up=limits.keeps_runners_up,
                )
                if limits.max_draft_len
                else None
            )
            runtime.wait()
        self._host_logits: Tensor | None = None
        counted = decoder.num_distinct
        self._num_distinct = None if counted is None else runtime.host_tensor((1,), counted.dtype)
        self._uploaded: RaggedBatch | None = None
        self._begun = self._ended = runtime.now()
        self._is_closed = False

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """The row counts that passes are padded to, ascending."""
        return (*self._buckets.sizes(), *self._buckets.large_sizes())

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def distinct_experts(self) -> float:
        """See Engine.distinct_experts. Counts the last pass whose results the host has read; after a draft call, that
        is the call's first pass."""
        return 0.0 if self._num_distinct is None else int(self._num_distinct[0]) / self._spec.num_layers

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes

    def use(self, partition: GpuPartition) -> None:
        """Switch to another partition from the next call on; waits for pending work on the old one."""
        self._move(partition)

    def capture_graphs(self, partitions: Iterable[GpuPartition]) -> int:
        """Run every possible pass once on each partition, so that no shape is new while serving, and capture their
        graphs. Return the number of graphs that did not fit the budget.

        Small passes come first. Call before serving, while no pass is running.
        """
        import torch

        before = self.graphs.num_left_out
        partitions = tuple(dict.fromkeys(partitions))
        current = self.partition
        with self.runtime.on(current):
            self._batch.clear()
        for rows in _largest_first(self._buckets.sizes()):
            for partition in partitions:
                self._capture_passes(rows, partition)
        if self._draft_loop is not None:
            for partition in partitions:
                self._move(partition)
                with self.runtime.on(partition), torch.no_grad():
                    for rows in self._draft_loop.sizes if self._spec.block_size else ():
                        work = functools.partial(self._decoder.write_logits, self._logits[:rows])
                        self.graphs.capture(("logits", rows, partition.name), work)
                    self._draft_loop.capture(partition.name)
        for rows in _largest_first(self._buckets.large_sizes()):
            for partition in partitions:
                self._capture_passes(rows, partition)
                with self.runtime.on(partition), torch.no_grad():
                    self._decoder.write_logits(self._logits[: self._logit_bucket(rows)])
        self._move(current)
        return self.graphs.num_left_out - before

    def run_segment(self, batch: RaggedBatch, segment: int) -> Any | None:
        self._check_open()
        num_segments = len(self._spec.segments) - 1
        if not 0 <= segment < num_segments:
            raise InvalidArgumentError(f"segment is {segment}, allowed is 0 to {num_segments - 1}")
        is_last = segment == num_segments - 1
        if segment and self._boundary.num_hidden != batch.num_rows:
            raise InvalidArgumentError(
                f"the batch has {batch.num_rows} rows, the segment before left {self._boundary.num_hidden}"
            )
        self._run(batch, segment, is_last)
        if not is_last:
            self._boundary.reach(segment, batch.num_rows)
            return None
        self._boundary.leave()
        return DeviceLogits(self._logits[: batch.logit_rows.size], self)

    def forward(self, batch: RaggedBatch) -> Any:
        """See Engine.forward. The logits are DeviceLogits."""
        self._run(batch, WHOLE_PASS, True)
        self._boundary.leave()
        return DeviceLogits(self._logits[: batch.logit_rows.size], self)

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        with self._enqueueing():
            self._boundary.compact_rows(rows)

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        with self._enqueueing():
            return self._boundary.early_exit(rows, candidates)

    def prune(self, batch: PruneBatch) -> npt.NDArray[np.int32]:
        if batch.rule.record is not None:  # the host reads the scores, so it decides as well
            return super().prune(batch)
        with self._enqueueing():
            return self._boundary.prune(batch)

    def copy_kv(self, copies: npt.NDArray[np.int32]) -> None:
        """See CpuEngine.copy_kv. Asynchronous, and at most max_num_branches copies. A head on another partition sees
        them once the engines have changed partitions."""
        spec, size, staging = self._spec, copies.size, self._copies
        blocks, first, end = copies[:2], copies[2], copies[3]
        if size > 4 * spec.max_num_branches or staging is None:
            raise InvalidArgumentError(f"{size // 4} copies, the engine allows {spec.max_num_branches}")
        if size and (blocks.min() < 0 or blocks.max() >= spec.num_kv_blocks):
            raise InvalidArgumentError(f"block ids are not all within 0 to {spec.num_kv_blocks - 1}")
        if size and (first.min() < 0 or end.max() > spec.tokens_per_block or (first >= end).any()):
            raise InvalidArgumentError(f"offsets are not all within 0 to {spec.tokens_per_block}, first before end")
        if not size:
            return
        with self._enqueueing():
            staging.fill()[:size] = copies.reshape(-1)
            staging.send(size)
            self._decoder.copy_kv(staging.device[:size].view(4, -1))

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        """See Engine.draft. Drafting runs and ends on the device; the host waits once, for the drafts."""
        self._check_open()
        max_draft_len = draft_batch.max_draft_len
        if self._draft_loop is None or max_draft_len > self._draft_loop.max_draft_len:
            held = 0 if self._draft_loop is None else self._draft_loop.max_draft_len
            raise ConfigError(f"max_draft_len is {max_draft_len}, the engine was opened for {held}")
        self._boundary.leave()
        with self._enqueueing():
            return self._draft_loop.draft(self, draft_batch)

    def run_rows(self, batch: RaggedBatch) -> None:
        """Run a whole pass and leave its logits on the device, at the start of their buffer."""
        if batch.logit_rows.size or self._decoder.has_kv:
            self._run(batch, WHOLE_PASS, True)

    def run_step(self, rows: int) -> None:
        """Run a draft step over the batch on the device, by its graph if there is one."""
        key = ("step", rows, self.partition.name)
        if not self._spec.reads_target:
            key = self._key(WHOLE_PASS, rows, Bounds(self._decoder.query_rows(1, rows), self._spec.max_seq_len))
        if not self.graphs.replay(key):
            self._step(rows)
        elif not self._spec.reads_target and not self._holds_logits(rows):  # then a pass's graph has no logits
            self._write_logits(rows)

    def host_logits(self, num_rows: int) -> npt.NDArray[np.float32]:
        """Return the logits of the last pass [num_rows, vocab_size] on the host, valid until the next call."""
        import torch

        if self._host_logits is None:
            shape = (self._max_logit_rows, self._spec.vocab_size)
            self._host_logits = self.runtime.host_tensor(shape, torch.float32)
        with self.runtime.on(self.partition):
            self._host_logits[:num_rows].copy_(self._logits[:num_rows], non_blocking=True)
            self.runtime.wait()
        array: npt.NDArray[np.float32] = self._host_logits.numpy()[:num_rows]
        return array

    def pass_ms(self) -> float:
        """Return the GPU time of the last pass in ms, without the host work before it. The pass must have finished."""
        return self.runtime.ms_between(self._begun, self._ended)

    def wait(self) -> None:
        """Sleep until all of the engine's work is done."""
        with self.runtime.on(self.partition):
            self.runtime.wait()

    def close(self) -> None:
        """Free graphs and device memory, even if the device has failed; the caller owns weights and partitions."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with self.runtime.on(self.partition):
                self.runtime.wait()
        finally:
            self.graphs.clear()
            self._draft_loop = None
            self._decoder.close()
            del self._decoder, self._batch, self._logits, self._boundary
            self._host_logits = None

    def _move(self, partition: GpuPartition) -> None:
        if partition != self.partition:
            with self.runtime.on(self.partition):
                self.runtime.wait()
            self.partition = partition

    def _run(self, batch: RaggedBatch, part: int, has_logits: bool) -> None:
        import torch

        self._check_open()
        num_logits = batch.logit_rows.size
        if has_logits and num_logits > self._max_logit_rows:
            raise InvalidArgumentError(f"logits of {num_logits} rows, the engine was opened for {self._max_logit_rows}")
        if batch.num_rows == 0:
            return
        widest = int((batch.cu_rows[1:] - batch.cu_rows[:-1]).max())  # np.diff takes three times as long
        rows = self._buckets.rows(batch.num_rows)
        bounds = self._bounds(batch, rows, widest)
        with self.runtime.on(self.partition), torch.no_grad():
            # Segments of one pass share a batch; a new pass may reuse the same arrays with new contents.
            if part in (WHOLE_PASS, 0) or batch is not self._uploaded:
                self._batch.upload(batch, rows, bounds.max_query_rows)
            self._uploaded = batch
            if part in (WHOLE_PASS, 0):
                self._begun = self.runtime.now()
            if not self.graphs.replay(self._key(part, rows, bounds)):
                self._run_part(part, rows, bounds)
            if has_logits:
                if num_logits and not self._holds_logits(rows):
                    self._write_logits(self._logit_bucket(num_logits))
                self._ended = self.runtime.now()
                if self._num_distinct is not None and self._decoder.num_distinct is not None:
                    self._num_distinct.copy_(self._decoder.num_distinct, non_blocking=True)
                if not num_logits and self._decoder.is_read:
                    self.runtime.wait()  # no logits are read, so nothing else makes the head's stream wait

    def _run_part(self, part: int, rows: int, bounds: Bounds) -> None:
        """Run one segment or all; small passes also compute the logits of all rows."""
        num_segments = len(self._spec.segments) - 1
        first, last = (0, num_segments) if part == WHOLE_PASS else (part, part + 1)
        self._decoder.run(rows, first, last, bounds)
        if last == num_segments and self._holds_logits(rows):
            self._decoder.write_logits(self._logits[:rows])

    def _holds_logits(self, rows: int) -> bool:
        """Return True if a pass computes the logits of all rows: small passes do, except a block drafter's."""
        return rows <= self._buckets.limit and not self._spec.block_size

    def _write_logits(self, rows: int) -> None:
        if not self.graphs.replay(("logits", rows, self.partition.name)):
            self._decoder.write_logits(self._logits[:rows])

    def _capture_passes(self, rows: int, partition: GpuPartition) -> None:
        import torch

        self._move(partition)
        num_segments = len(self._spec.segments) - 1
        with self.runtime.on(partition), torch.no_grad():
            for part in (WHOLE_PASS, *(range(num_segments) if num_segments > 1 else ())):
                for bounds in self._all_bounds(rows):
                    work = functools.partial(self._run_part, part, rows, bounds)
                    if not self.graphs.capture(self._key(part, rows, bounds), work):
                        self.sizes_without_graph.add(rows)

    def _step(self, rows: int) -> None:
        """Run a draft step: a whole pass with one row per request over the batch on the device."""
        self._decoder.step(rows, Bounds(1, self._spec.max_seq_len), self._logits[:rows])

    def _bounds(self, batch: RaggedBatch, rows: int, widest: int) -> Bounds:
        """Return the bounds of a pass; widest: the largest number of rows of one request."""
        *shorter, kv_len = self._kv_lens(rows)
        if shorter:
            longest = int(batch.positions.max()) + 1
            kv_len = next((bound for bound in shorter if longest <= bound), kv_len)
        return Bounds(self._decoder.query_rows(widest, rows), kv_len)

    def _all_bounds(self, rows: int) -> list[Bounds]:
        """Return all bounds of passes in a bucket, from equal shares of the rows to all rows in one request."""
        fewest = -(-rows // self._spec.num_slots)
        query_rows = sorted({self._decoder.query_rows(count, rows) for count in range(fewest, rows + 1)})
        return [Bounds(count, kv_len) for count in query_rows for kv_len in self._kv_lens(rows)]

    def _kv_lens(self, rows: int) -> tuple[int, ...]:
        """Return the bounds on context lengths; small passes use only the last, since more would double the graphs."""
        return self._decoder.kv_lens()[-1:] if rows <= self._buckets.limit else self._decoder.kv_lens()

    def _logit_bucket(self, num_logits: int) -> int:
        """Return the bucket for this many logit rows; a block drafter has at most max_batch_size, one per request."""
        most = self._spec.max_batch_size if self._spec.block_size else self._max_logit_rows
        return min(self._buckets.rows(num_logits), most)

    def _key(self, part: int, rows: int, bounds: Bounds) -> tuple[Any, ...]:
        return ("pass", part, rows, bounds.max_query_rows, bounds.max_kv_len, self.partition.name)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the engine is closed")

    @contextlib.contextmanager
    def _enqueueing(self) -> Iterator[None]:
        import torch

        self._check_open()
        with self.runtime.on(self.partition), torch.no_grad():
            yield


def _largest_first(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the largest size, then the others ascending: graphs share a pool and reuse what the largest allocates."""
    return (*sizes[-1:], *sizes[:-1])
