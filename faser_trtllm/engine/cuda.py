"""The cuda engine: one model on a GPU through torch and the kernels of plugins/cuda.

Not run on a GPU yet. Everything but streams, events, graphs and the kernels' launch is tested on the CPU, with the
kernels' references and, emulated, the kernels themselves (tests/engine/test_cuda*.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.cuda_batch import DeviceBatch
from faser_trtllm.engine.cuda_decoder import Bounds, Decoder
from faser_trtllm.engine.cuda_draft import DraftLaws, DraftLoop
from faser_trtllm.engine.cuda_graphs import GraphStore
from faser_trtllm.engine.cuda_limits import CudaLimits
from faser_trtllm.engine.cuda_logits import DeviceLogits
from faser_trtllm.engine.cuda_ops import Ops
from faser_trtllm.engine.cuda_runtime import Runtime
from faser_trtllm.engine.cuda_staging import Staging
from faser_trtllm.engine.cuda_weights import DeviceWeights
from faser_trtllm.engine.tensorrt_buckets import Buckets
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from faser_trtllm.ops.cuda.compact_rows import CompactedRows
from faser_trtllm.ops.cuda.early_exit import MAX_CANDIDATES
from faser_trtllm.partition.green_context import GpuPartition

if TYPE_CHECKING:
    from torch import Tensor

Int32Array = npt.NDArray[np.int32]

WHOLE_PASS = -1
"""In the place of a segment: all of them."""

_NARROW_ROWS = 16  # packed rows of one tile of attention


class CudaEngine:
    """Engine (engine/base.py) over weights in device memory. Not thread-safe: one caller at a time, on any thread.

    A pass of up to max_graph_rows rows is padded to a bucket. All inputs, hidden rows, caches and outputs have places
    for life, and a replayed graph allocates nothing; larger passes allocate from torch's cache, not from the device.
    """

    def __init__(
        self,
        weights: DeviceWeights,
        segments: tuple[int, ...],
        ops: Ops,
        runtime: Runtime,
        partition: GpuPartition,
        limits: CudaLimits,
        *,
        laws: DraftLaws | None = None,
        keep_logits: bool = False,
    ) -> None:
        """laws: where unseeded drafts leave the law they were drawn from, for a test on the device; without it, laws go
        to the memory of the sampling table. keep_logits: forward() and run_segment() return DeviceLogits, not arrays.

        Raises ConfigError for limits that cannot be.
        """
        import torch

        limits.check(weights)
        sizes = weights.sizes
        self._spec = EngineSpec(
            vocab_size=sizes["vocab_size"],
            max_seq_len=limits.max_seq_len,
            num_layers=sizes["num_layers"],
            num_blocks=limits.num_blocks,
            tokens_per_block=limits.tokens_per_block,
            max_num_tokens=limits.max_num_tokens,
            max_batch_size=limits.max_batch_size,
            segments=segments,
        )
        self.runtime = runtime
        self.partition = partition
        self._ops = ops
        self._keep_logits = keep_logits
        self._max_logit_rows = max(min(limits.max_logit_rows, limits.max_num_tokens), limits.max_batch_size)
        self._buckets = Buckets(max(1, min(limits.max_graph_rows, limits.max_num_tokens, self._max_logit_rows)))
        runtime.wait()  # weights and laws may have been made on the default stream, which others do not wait for
        with runtime.on(partition), torch.no_grad():
            self._batch = DeviceBatch(runtime, self._spec)
            self._decoder = Decoder(weights, ops, self._spec)
            self.graphs = GraphStore(runtime, limits.graph_bytes)
            logits = (self._max_logit_rows, sizes["vocab_size"])
            self._logits = torch.zeros(logits, dtype=torch.float32, device=runtime.device)
            self._exit_staging = Staging(runtime, (1 + MAX_CANDIDATES) * limits.max_num_tokens)
            self._compaction = _Compaction(self._decoder.hidden, limits)
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
                    laws,
                    limits.max_draft_len,
                )
                if limits.max_draft_len
                else None
            )
            runtime.wait()
        self._host_logits: Tensor | None = None
        self._num_hidden: int | None = None  # hidden rows that a segment left, dummies not counted
        self._uploaded: RaggedBatch | None = None
        self._begun = self._ended = runtime.now()
        self._is_closed = False

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def weight_bytes(self) -> int:
        """Device memory of the weights."""
        return self._decoder.weights.num_bytes

    def use(self, partition: GpuPartition) -> None:
        """Run on another partition from the next call on; what was given to the old one is waited for."""
        if partition != self.partition:
            with self.runtime.on(self.partition):
                self.runtime.wait()
            self.partition = partition

    def capture_graphs(self, partitions: Iterable[GpuPartition]) -> int:
        """Capture the graphs of every pass up to max_graph_rows on each partition -> graphs that the budget left out.

        Small passes come first. To be called before serving: no pass may be under way.
        """
        import torch

        before = self.graphs.num_left_out
        partitions = tuple(dict.fromkeys(partitions))
        num_segments = len(self._spec.segments) - 1
        parts = [WHOLE_PASS, *(range(num_segments) if num_segments > 1 else ())]
        current = self.partition
        with self.runtime.on(current):
            self._batch.clear()
        for rows in self._buckets.sizes():
            for partition in partitions:
                self.use(partition)
                with self.runtime.on(partition), torch.no_grad():
                    for part in parts:
                        for narrow in (True, False):
                            if self._has_graph(rows, narrow):
                                self.graphs.capture(self._key(part, rows, narrow), self._work(part, rows, narrow))
        if self._draft_loop is not None:
            for partition in partitions:
                self.use(partition)
                with self.runtime.on(partition), torch.no_grad():
                    self._draft_loop.capture(partition.name)
        self.use(current)
        return self.graphs.num_left_out - before

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        num_segments = len(self._spec.segments) - 1
        if not 0 <= segment < num_segments:
            raise InvalidArgumentError(f"segment is {segment}, allowed is 0 to {num_segments - 1}")
        is_last = segment == num_segments - 1
        if segment and self._hidden_rows() != batch.num_rows:
            raise InvalidArgumentError(
                f"the batch has {batch.num_rows} rows, the segment before left {self._hidden_rows()}"
            )
        self._run(batch, segment, is_last)
        self._num_hidden = None if is_last else batch.num_rows
        if not is_last:
            return None
        logits: npt.NDArray[np.float32] = self._returned_logits(batch.logit_rows.size)
        return logits

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        self._run(batch, WHOLE_PASS, True)
        self._num_hidden = None
        logits: npt.NDArray[np.float32] = self._returned_logits(batch.logit_rows.size)
        return logits

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        import torch

        num_hidden = self._hidden_rows()
        if rows.size and (rows[0] < 0 or rows[-1] >= num_hidden or (np.diff(rows) <= 0).any()):
            raise InvalidArgumentError(
                f"rows is {rows.tolist()}, it must list rows 0 to {num_hidden - 1} ascending, each once"
            )
        size = self._buckets.rows(rows.size)
        with self.runtime.on(self.partition), torch.no_grad():
            listed = self._exit_staging.fill()
            listed[: rows.size], listed[rows.size : size] = rows, -1
            self._exit_staging.send(size)
            kept = self._compaction.kept(size)
            hidden, batch = self._decoder.hidden, self._batch
            self._ops.compact_rows(
                hidden[:num_hidden],
                batch.positions[:num_hidden],
                self._exit_staging.device[:size],
                batch.cu_q_lens,
                batch.kv_lens,
                self._spec.max_seq_len,
                kept,
            )
            # Back to where graphs expect hidden rows; what describes them is uploaded with the next batch.
            hidden[:size].copy_(kept.hidden)
        self._num_hidden = rows.size

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        import torch

        num_hidden = self._hidden_rows()
        if candidates.ndim != 2 or candidates.shape[0] != rows.size or candidates.shape[1] > MAX_CANDIDATES:
            raise ValueError(
                f"{rows.size} rows need candidates [{rows.size}, n <= {MAX_CANDIDATES}], not {list(candidates.shape)}"
            )
        if rows.size and not (rows.min() >= 0 and rows.max() < num_hidden):
            raise InvalidArgumentError(f"rows is {rows.tolist()}, allowed is 0 to {num_hidden - 1}")
        if candidates.size and candidates.max() >= self._spec.vocab_size:
            raise InvalidArgumentError(
                f"candidates have token id {candidates.max()}, the largest is {self._spec.vocab_size - 1}"
            )
        if not candidates.size:
            return np.zeros(candidates.shape, np.float32)
        n, width = candidates.shape
        with self.runtime.on(self.partition), torch.no_grad():
            start = -(-n // 4) * 4
            filled = self._exit_staging.fill()
            filled[:n] = rows
            filled[start : start + n * width] = candidates.reshape(-1)
            self._exit_staging.send(start + n * width)
            device = self._exit_staging.device
            scores = torch.empty((n, width), dtype=torch.float32, device=self.runtime.device)
            self._decoder.early_exit(device[:n], device[start : start + n * width].view(n, width), scores)
            found: npt.NDArray[np.float32] = scores.cpu().numpy()
        return found

    def draft(
        self,
        batch: RaggedBatch,
        sampling: npt.NDArray[np.void],
        num_tokens: npt.NDArray[np.int32],
        num_drafts: npt.NDArray[np.int32],
        num_new_drafts: npt.NDArray[np.int32],
        max_draft_len: int,
        stop: DraftStop | None = None,
    ) -> npt.NDArray[np.int32]:
        """As Engine.draft. On the device, without the host in between, unless stop or a request's edits need it."""
        import torch

        if self._draft_loop is None or max_draft_len > self._draft_loop.max_draft_len:
            held = 0 if self._draft_loop is None else self._draft_loop.max_draft_len
            raise ConfigError(f"max_draft_len is {max_draft_len}, the engine was opened for {held}")
        self._num_hidden = None
        with self.runtime.on(self.partition), torch.no_grad():
            arguments = (batch, sampling, num_tokens, num_drafts, num_new_drafts, max_draft_len, stop)
            return self._draft_loop.draft(self, *arguments)

    def run_rows(self, batch: RaggedBatch) -> None:
        """A whole pass whose logits stay on the device, in the first rows of their buffer."""
        self._run(batch, WHOLE_PASS, True)

    def host_logits(self, num_rows: int) -> npt.NDArray[np.float32]:
        """The logits of the last pass [num_rows, vocab_size]; valid until the next call."""
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
        """What the last pass took on its partition, once it is over: graphs and launches, not the host before them."""
        return self.runtime.ms_between(self._begun, self._ended)

    def close(self) -> None:
        """Free graphs and device memory; weights and partitions are the caller's."""
        if self._is_closed:
            return
        with self.runtime.on(self.partition):
            self.runtime.wait()
        self._is_closed = True
        self.graphs.clear()
        self._draft_loop = None
        del self._decoder, self._batch, self._logits, self._compaction, self._exit_staging
        self._host_logits = None

    def __enter__(self) -> CudaEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, batch: RaggedBatch, part: int, has_logits: bool) -> None:
        import torch

        if self._is_closed:
            raise ValueError("the engine is closed")
        num_logits = batch.logit_rows.size
        if has_logits and num_logits > self._max_logit_rows:
            raise InvalidArgumentError(f"logits of {num_logits} rows, the engine was opened for {self._max_logit_rows}")
        if batch.num_rows == 0:
            return
        with self.runtime.on(self.partition), torch.no_grad():
            # Segments of one pass share a batch; what a pass begins with may be new in the same arrays.
            if part in (WHOLE_PASS, 0) or batch is not self._uploaded:
                self._batch.upload(batch)
            self._uploaded = batch
            if part in (WHOLE_PASS, 0):
                self._begun = self.runtime.now()
            widest = int(np.diff(batch.cu_rows).max())
            narrow = widest * self._decoder.group <= _NARROW_ROWS
            rows = self._buckets.rows(batch.num_rows)
            if not self.graphs.replay(self._key(part, rows, narrow)):
                longest = int(batch.positions.max()) + 1
                is_padded = rows <= self._buckets.limit
                self._run_part(part, rows, rows if is_padded else num_logits, Bounds(widest, longest))
            if has_logits:
                self._ended = self.runtime.now()

    def _run_part(self, part: int, rows: int, num_logits: int, bounds: Bounds) -> None:
        segments = self._spec.segments
        first, last = (0, segments[-1]) if part == WHOLE_PASS else segments[part : part + 2]
        self._decoder.run(self._batch, rows, first, last, bounds)
        if last == segments[-1] and num_logits:
            self._decoder.logits(self._batch.logit_rows[:num_logits], self._logits[:num_logits])

    def _step(self, rows: int) -> None:
        """A draft step: a whole pass of one row per request over what is in the batch on the device."""
        self._run_part(WHOLE_PASS, rows, rows, Bounds(1, self._spec.max_seq_len))

    def _work(self, part: int, rows: int, narrow: bool) -> Callable[[], None]:
        bounds = Bounds(max(1, _NARROW_ROWS // self._decoder.group) if narrow else rows, self._spec.max_seq_len)
        return lambda: self._run_part(part, rows, rows, bounds)

    def _key(self, part: int, rows: int, narrow: bool) -> tuple[Any, ...]:
        return ("pass", part, rows, narrow, self.partition.name)

    def _has_graph(self, rows: int, narrow: bool) -> bool:
        """Whether a bucket holds passes whose every request has few rows, or passes where one has many."""
        per_request = _NARROW_ROWS // self._decoder.group
        return rows <= self._spec.max_batch_size * per_request if narrow else rows > per_request

    def _hidden_rows(self) -> int:
        if self._num_hidden is None:
            raise InvalidArgumentError("there are no hidden rows, run a segment that is not the last one first")
        return self._num_hidden

    def _returned_logits(self, num_rows: int) -> Any:
        if self._keep_logits:
            return DeviceLogits(self._logits[:num_rows], self)
        return self.host_logits(num_rows)


class _Compaction:
    """Where compact_rows writes before its hidden rows go back: its outputs may not overlap its inputs."""

    def __init__(self, hidden: Tensor, limits: CudaLimits) -> None:
        import torch

        rows, batch = limits.max_num_tokens, limits.max_batch_size
        self._hidden = torch.zeros_like(hidden)
        sizes = (rows, rows, batch + 1, batch)
        self._arrays = [torch.zeros(size, dtype=torch.int32, device=hidden.device) for size in sizes]

    def kept(self, rows: int) -> CompactedRows:
        positions, request_ids, cu_q_lens, kv_lens = self._arrays
        return CompactedRows(self._hidden[:rows], positions[:rows], request_ids[:rows], cu_q_lens, kv_lens)
