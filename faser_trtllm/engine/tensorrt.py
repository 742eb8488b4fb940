"""The TensorRT engine: the segments of one model on a GPU, one graph launch per segment and size of pass.

Not run on a GPU: what is tested runs over a stand-in of the runtime and the device (tests/engine/test_tensorrt.py).
Logits go to the host, where the sampling ops are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.builder.plan_file import PlanFile
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.draft_loop import draft_loop
from faser_trtllm.engine.tensorrt_buckets import Buckets
from faser_trtllm.engine.tensorrt_device import Device, GpuPartition
from faser_trtllm.engine.tensorrt_inputs import PaddedInputs, padded_inputs
from faser_trtllm.engine.tensorrt_memory import EngineMemory
from faser_trtllm.engine.tensorrt_plans import Plans, check_requirements
from faser_trtllm.errors import ConfigError, FaserError, InvalidArgumentError
from faser_trtllm.models.weights import float32_from_bfloat16

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class TensorRTEngine:
    """Engine (engine/base.py) over one plan file. Not thread-safe: one caller at a time, on any thread.

    Every input and output has its place in device memory for life: captured graphs hold the addresses. Hidden rows
    alternate between two buffers; a cache output is bound to its input. A pass is padded to a bucket (tensorrt_buckets)
    and, from the third time that its sizes come, a replay of the graph captured on the partition's stream.
    """

    def __init__(
        self,
        file: PlanFile,
        plans: Plans,
        memory: EngineMemory,
        device: Device,
        partition: GpuPartition,
        spec: EngineSpec,
        max_logit_rows: int,
        resources: ExitStack,
    ) -> None:
        """open() makes one. resources: closes what the engine is made of; the engine's graphs go first."""
        self._file = file
        self._plans = plans
        self._memory = memory
        self._device = device
        self._partition = partition
        self._spec = spec
        self._max_logit_rows = max_logit_rows
        self._resources = resources
        self._options = file.network
        self._buckets = Buckets((*file.network.profile_rows, file.network.max_num_tokens)[0])
        self._flavour = file.segments[0].info.flavour
        self._graphs: dict[tuple[Any, ...], int] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._in_flight: set[int] = set()  # plans whose host inputs the device may not have read yet
        self._read = 0  # the hidden buffer that holds the current rows
        self._network_row: Int32Array | None = None  # of the current hidden rows, by the caller's index
        self._logits = np.zeros((max_logit_rows, spec.vocab_size), np.float32)
        resources.callback(self._destroy_graphs)

    @classmethod
    def open(
        cls,
        path: Path,
        trt: Any,
        device: Device,
        partition: GpuPartition,
        *,
        num_blocks: int,
        max_batch_size: int,
        max_num_tokens: int,
        max_seq_len: int,
        max_logit_rows: int,
        cache_dir: Path | None = None,
    ) -> TensorRTEngine:
        """Deserialise an engine file and allocate its KV memory, inputs and outputs.

        Limits may be below those the file was built for. max_logit_rows: rows of one pass whose logits may be asked
        for. Raises EngineFileError where the file does not fit this GPU or this TensorRT, and ConfigError for limits.
        """
        with ExitStack() as guard:
            resources = guard.enter_context(ExitStack())
            device.make_current()
            file = resources.enter_context(PlanFile.open(path))
            check_requirements(file.label, file.requirements, trt, device.compute_capability)
            built, segments = file.network, file.segments
            limits = {"max_batch_size": max_batch_size, "max_num_tokens": max_num_tokens, "max_seq_len": max_seq_len}
            for name, value in limits.items():
                if not 1 <= value <= getattr(built, name):
                    raise ConfigError(f"{name} is {value}, {file.label} was built for 1 to {getattr(built, name)}")
            if segments[0].info.flavour == "native" and num_blocks != built.max_batch_size:
                raise ConfigError(
                    f"num_blocks is {num_blocks}, the linear caches of {file.label} are {built.max_batch_size} blocks"
                )
            (logits,) = (spec for spec in segments[-1].info.outputs if spec.name == "logits")
            max_logit_rows = min(max_logit_rows, max_num_tokens)
            sizes = {name: largest for name, (_, _, largest) in built.dimension_ranges(built.max_num_tokens).items()}
            buckets = Buckets((*built.profile_rows, built.max_num_tokens)[0])
            sizes |= {"logit_rows": buckets.rows(max_logit_rows), "blocks": num_blocks}
            memory = EngineMemory(device, file, sizes)
            resources.callback(memory.close)
            plans = Plans(trt, file, device, cache_dir)
            resources.callback(plans.close)
            spec = EngineSpec(
                vocab_size=int(logits.shape[1]),
                max_seq_len=max_seq_len,
                num_layers=segments[-1].info.last,
                num_blocks=num_blocks,
                tokens_per_block=built.tokens_per_block,
                max_num_tokens=max_num_tokens,
                max_batch_size=max_batch_size,
                segments=(0, *(plan.info.last for plan in segments)),
            )
            engine = cls(file, plans, memory, device, partition, spec, max_logit_rows, resources)
            guard.pop_all()
            return engine

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    def use(self, partition: GpuPartition) -> None:
        """Run on another partition from the next pass on. The old one's stream is drained first."""
        if partition != self._partition:
            self._device.make_current()
            self._synchronize()
            self._partition = partition

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        self._device.make_current()
        num_segments = len(self._file.segments)
        if not 0 <= segment < num_segments:
            raise InvalidArgumentError(f"segment is {segment}, allowed is 0 to {num_segments - 1}")
        is_last = segment == num_segments - 1
        if batch.num_rows == 0:
            return self._logits[:0] if is_last else None
        self._check(batch, segment, is_last)
        inputs = padded_inputs(batch, self._flavour, self._options, self._buckets, self._spec.num_blocks)
        self._run_plan(segment, inputs)
        if is_last:
            self._network_row = None
            return self._fetch_logits(segment, batch.logit_rows.size)
        self._read = 1 - self._read
        self._network_row = inputs.network_row
        return None

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        logits = None
        for segment in range(len(self._file.segments)):
            logits = self.run_segment(batch, segment)
        assert logits is not None
        return logits

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        self._device.make_current()
        network_row = self._hidden_rows()
        if rows.size and (rows[0] < 0 or rows[-1] >= network_row.size or (np.diff(rows) <= 0).any()):
            raise InvalidArgumentError(
                f"rows is {rows.tolist()}, it must list rows 0 to {network_row.size - 1} ascending, each once"
            )
        kept = network_row[rows]
        in_order = np.sort(kept)
        source = self._memory.address("hidden_in", self._read)
        target = self._memory.address("hidden_out", self._read)
        row_bytes = self._memory.hidden_row_bytes
        for start, first, count in _runs(in_order):
            self._device.copy(
                target + start * row_bytes, source + first * row_bytes, count * row_bytes, self._partition.stream
            )
        # Dummy rows write KV that is masked, and masked NaN spreads: they must be finite.
        num_dummies = self._buckets.rows(rows.size) - rows.size
        if num_dummies:
            self._device.zero(target + rows.size * row_bytes, num_dummies * row_bytes, self._partition.stream)
        self._read = 1 - self._read
        self._network_row = np.searchsorted(in_order, kept).astype(np.int32)

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        self._device.make_current()
        network_row, width = self._hidden_rows(), self._options.num_candidates
        if candidates.ndim != 2 or candidates.shape[0] != rows.size or candidates.shape[1] > width:
            raise ValueError(f"{rows.size} rows need candidates [{rows.size}, n <= {width}], not {candidates.shape}")
        if rows.size and not (rows.min() >= 0 and rows.max() < network_row.size):
            raise InvalidArgumentError(f"rows is {rows.tolist()}, allowed is 0 to {network_row.size - 1}")
        if candidates.size and candidates.max() >= self._spec.vocab_size:
            raise InvalidArgumentError(
                f"candidates have token id {candidates.max()}, the largest is {self._spec.vocab_size - 1}"
            )
        if not rows.size:
            return np.zeros(candidates.shape, np.float32)
        num_rows = self._buckets.rows(rows.size)
        exit_rows = np.zeros(num_rows, np.int32)
        exit_rows[: rows.size] = network_row[rows]
        padded = np.full((num_rows, width), -1, np.int32)
        padded[: rows.size, : candidates.shape[1]] = candidates
        sizes = {"rows": self._buckets.rows(network_row.size), "exit_rows": num_rows}
        index = len(self._file.segments)
        self._run_plan(index, PaddedInputs({"exit_rows": exit_rows, "candidates": padded}, sizes, network_row))
        scores: Float32Array = self._fetch(index, "scores", rows.size)[:, : candidates.shape[1]].copy()
        return scores

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
        return draft_loop(
            self.forward,
            self._spec.vocab_size,
            batch,
            sampling,
            num_tokens,
            num_drafts,
            num_new_drafts,
            max_draft_len,
            stop,
        )

    def close(self) -> None:
        """Graphs, contexts, engines, memory, file, in this order; the device and its streams stay the caller's."""
        self._device.make_current()
        self._synchronize()
        self._plans.save_caches()
        self._resources.close()

    def __enter__(self) -> TensorRTEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_plan(self, index: int, inputs: PaddedInputs) -> None:
        """Upload the inputs and run plan `index` on them, by graph where there is one."""
        info, stream = self._file.plans[index].info, self._partition.stream
        if index in self._in_flight:
            self._synchronize()
        names = {spec.name for spec in info.inputs}
        for name, array in inputs.arrays.items():
            if name in names:
                staging = self._memory.host(index, name)[: array.size]
                staging[:] = array.reshape(-1)
                self._device.upload(self._memory.address(name, self._read), staging, stream)
        self._in_flight.add(index)
        rows = max(inputs.sizes["rows"], inputs.sizes.get("exit_rows", 0))
        profile = self._plans.profile(rows)
        key = (index, self._read, self._partition.name, *sorted(inputs.sizes.items()))
        if key in self._graphs:
            self._device.launch_graph(self._graphs[key], stream)
            return
        # The first run after shapes changed brings TensorRT's own state up to date, which must not be captured.
        self._bind(index, profile, inputs)
        self._plans.enqueue(index, profile, self._partition)
        if key in self._seen and self._plans.is_capturable(index, profile, self._partition):
            self._graphs[key] = self._capture(index, profile)
        elif self._buckets.has_graph(rows):
            self._seen.add(key)

    def _bind(self, index: int, profile: int, inputs: PaddedInputs) -> None:
        info = self._file.plans[index].info
        shapes = {
            spec.name: tuple(inputs.sizes[size] if isinstance(size, str) else size for size in spec.shape)
            for spec in info.inputs
            if spec.is_dynamic
        }
        addresses = {spec.name: self._memory.address(spec.name, self._read) for spec in (*info.inputs, *info.outputs)}
        self._plans.bind(index, profile, self._partition, shapes, addresses)

    def _capture(self, index: int, profile: int) -> int:
        """A graph of what was just run; it is not run again."""
        stream = self._partition.stream
        self._device.begin_capture(stream)
        try:
            self._plans.enqueue(index, profile, self._partition)
        except BaseException:
            with contextlib.suppress(FaserError):  # the first error says more
                self._device.destroy_graph(self._device.end_capture(stream))
            raise
        return self._device.end_capture(stream)

    def _fetch(self, index: int, name: str, num_rows: int) -> npt.NDArray[Any]:
        rows = self._memory.host(index, name)[:num_rows]
        if num_rows:
            self._device.download(rows, self._memory.address(name, self._read), self._partition.stream)
        self._synchronize()
        return rows

    def _fetch_logits(self, index: int, num_rows: int) -> Float32Array:
        raw = self._fetch(index, "logits", num_rows)
        logits = self._logits[:num_rows]
        logits[:] = float32_from_bfloat16(raw) if raw.dtype == np.uint16 else raw
        return logits

    def _synchronize(self) -> None:
        self._device.synchronize(self._partition.stream)
        self._in_flight.clear()

    def _hidden_rows(self) -> Int32Array:
        if self._network_row is None:
            raise InvalidArgumentError("there are no hidden rows, run a segment that is not the last one first")
        return self._network_row

    def _check(self, batch: RaggedBatch, segment: int, is_last: bool) -> None:
        spec = self._spec
        if batch.num_rows > spec.max_num_tokens or batch.num_requests > spec.max_batch_size:
            raise InvalidArgumentError(
                f"a pass of {batch.num_rows} rows of {batch.num_requests} requests, the engine allows "
                f"{spec.max_num_tokens} rows of {spec.max_batch_size}"
            )
        if batch.token_ids.min() < 0 or batch.token_ids.max() >= spec.vocab_size:
            raise InvalidArgumentError(f"token_ids are not all within 0 to {spec.vocab_size - 1}")
        if is_last and batch.logit_rows.size > self._max_logit_rows:
            raise InvalidArgumentError(
                f"logits of {batch.logit_rows.size} rows, the engine was opened for {self._max_logit_rows}"
            )
        if segment and self._hidden_rows().size != batch.num_rows:
            raise InvalidArgumentError(
                f"the batch has {batch.num_rows} rows, the segment before left {self._hidden_rows().size}"
            )

    def _destroy_graphs(self) -> None:
        for graph in self._graphs.values():
            self._device.destroy_graph(graph)
        self._graphs.clear()


def _runs(rows: Int32Array) -> Iterator[tuple[int, int, int]]:
    """Ascending rows as runs of neighbours: place in `rows`, first row, number of rows."""
    starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    ends = np.append(starts[1:], rows.size)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        yield start, int(rows[start]), end - start
