"""Section "partitions": the GEMMs of a verification and of a draft loop on partitions of the SMs, alone and together.

Partitions divide SMs but not memory bandwidth: the table shows the slowdown of each side and whether concurrency is
faster than a sequence. Only GEMMs run, independent of an engine; graphs are captured on their partition's stream, which
binds them to its SMs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.gemms import DRY_SHAPE, matrices
from benchmarks.gpu.models.enlarge import DecoderShape, shape_named
from benchmarks.gpu.options import DRAFT_OF
from faser_trtllm.partition.green_context import GpuPartition, GpuPartitions, PartitionPair

DRAFT_SMS = (16, 24, 32, 48, 64)
DRAFT_LEN = 4
MAX_TARGET_LAYERS = 8  # of the target; the others would take as long
LOADS, DRY_LOADS = ((4, 20), (32, 160), (64, 320), (128, 640)), ((1, 2),)  # draft rows per step, verified rows
NUM_REPEATS = 5
GATE_CYCLES = 4_000_000  # about 2 ms: all work is queued before the gate opens


class Streams:
    """A runner of work on partitions of a GPU, alone or concurrently. DryStreams is its stand-in."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self._streams: dict[int, Any] = {}
        self._gate = self._torch.cuda.Stream()

    def stream(self, partition: GpuPartition) -> Any:
        if partition.stream not in self._streams:
            self._streams[partition.stream] = self._torch.cuda.ExternalStream(partition.stream)
        return self._streams[partition.stream]

    def capture(self, partition: GpuPartition, work: Callable[[], object]) -> Callable[[], object]:
        """Capture a graph whose nodes run on the partition."""
        torch, stream = self._torch, self.stream(partition)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                work()
        replay: Callable[[], object] = graph.replay
        return replay

    def times_ms(self, jobs: Sequence[tuple[GpuPartition, Callable[[], object], int]]) -> list[float]:
        """Start all (partition, work, repetitions) at the same moment, and return median ms until the end of each."""
        torch, found = self._torch, []
        for number in range(NUM_REPEATS + 1):
            torch.cuda.synchronize()
            go = torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(self._gate):
                torch.cuda._sleep(GATE_CYCLES)
                go.record(self._gate)
            ends = []
            for partition, work, count in jobs:
                stream = self.stream(partition)
                with torch.cuda.stream(stream):
                    stream.wait_event(go)
                    for _ in range(count):
                        work()
                    ends.append(torch.cuda.Event(enable_timing=True))
                    ends[-1].record(stream)
            torch.cuda.synchronize()
            if number:
                found.append([go.elapsed_time(end) for end in ends])
        return [statistics.median(column) for column in zip(*found, strict=True)]


class DryStreams:
    """A stand-in for Streams that runs work in sequence on the CPU."""

    def capture(self, partition: GpuPartition, work: Callable[[], object]) -> Callable[[], object]:
        work()
        return work

    def times_ms(self, jobs: Sequence[tuple[GpuPartition, Callable[[], object], int]]) -> list[float]:
        times, start = [], time.perf_counter()
        for _, work, count in jobs:
            for _ in range(count):
                work()
            times.append(1e3 * (time.perf_counter() - start))
        return times


@dataclass(frozen=True)
class Row:
    """One load on one division. draft_*: DRAFT_LEN steps; serial_ms: in sequence on all SMs."""

    form: str
    draft_rows: int
    verify_rows: int
    division: str
    draft_ms: float
    verify_ms: float
    draft_together_ms: float
    verify_together_ms: float
    serial_ms: float

    @property
    def gain(self) -> float:
        return self.serial_ms / max(self.draft_together_ms, self.verify_together_ms)


def run(bench: Bench) -> None:
    with ExitStack() as stack:
        if bench.machine.is_gpu:
            divisions = stack.enter_context(GpuPartitions([n for n in DRAFT_SMS if n < bench.machine.num_sms]))
            whole, pairs, kind = divisions.whole, list(divisions.pairs), divisions.kind
            streams: Streams | DryStreams = Streams()
        else:
            whole, kind, streams = GpuPartition("whole", 0, 4), "dry run", DryStreams()
            pairs = [PartitionPair(GpuPartition("draft 1:3", 0, 1), GpuPartition("target 1:3", 0, 3))]
        bench.record.value("kind", kind)
        bench.record.value("granted", [[pair.draft.num_sms, pair.target.num_sms] for pair in pairs])
        # Two streams of the whole device, for the gain of overlap without partitions.
        other = _second_stream(bench)
        pairs = [PartitionPair(other, whole), *pairs]
        for form in bench.options.forms[:1]:
            bench.record.attempt(form, lambda form=form: _form(bench, form, whole, pairs, streams))  # type: ignore[misc]


def _second_stream(bench: Bench) -> GpuPartition:
    if not bench.machine.is_gpu:
        return GpuPartition("whole again", 0, bench.machine.num_sms)
    import torch

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # of torch's pool, which outlives the section
    return GpuPartition("whole again", stream.cuda_stream, bench.machine.num_sms)


def _form(
    bench: Bench, form: str, whole: GpuPartition, pairs: list[PartitionPair], streams: Streams | DryStreams
) -> None:
    dry = bench.is_dry
    target, draft = (DRY_SHAPE if dry else shape_named(name) for name in (form, DRAFT_OF[form]))
    num_layers = min(MAX_TARGET_LAYERS, target.num_layers)
    scale = target.num_layers / num_layers
    stacks = _Stack(bench, target, num_layers, 1), _Stack(bench, draft, draft.num_layers, 2)
    rows: list[Row] = []
    for draft_rows, verify_rows in DRY_LOADS if dry else LOADS:
        verify, step = stacks[0].work(verify_rows), stacks[1].work(draft_rows)
        # The stack has some of the target's layers, so its pass is repeated to make a whole one.
        repeats = max(1, round(scale))
        alone = streams.capture(whole, verify), streams.capture(whole, step)
        jobs = [(whole, alone[0], repeats), (whole, alone[1], DRAFT_LEN)]
        serial_ms = sum(streams.times_ms([job])[0] for job in jobs)
        for pair in pairs:
            if bench.left_s < 0:
                bench.record.error("the time was over")
                return
            both = (
                (pair.draft, streams.capture(pair.draft, step), DRAFT_LEN),
                (pair.target, streams.capture(pair.target, verify), repeats),
            )
            (draft_ms,), (verify_ms,) = (streams.times_ms([work]) for work in both)
            together = streams.times_ms(both)
            division = f"{pair.draft.num_sms}/{pair.target.num_sms}"
            times = (draft_ms, verify_ms, *together, serial_ms)
            rows.append(Row(form, draft_rows, verify_rows, division, *times))
            _write(bench, rows)


class _Stack:
    """Random matrices of some layers, run like a pass without attention."""

    def __init__(self, bench: Bench, shape: DecoderShape, num_layers: int, seed: int) -> None:
        import torch

        self._device = bench.machine.device
        self._generator = bench.machine.generator(bench.options.seed + seed)
        self._weights = [
            (torch.randn(out, width, generator=self._generator, device=self._device) / math.sqrt(width)).bfloat16()
            for _ in range(num_layers)
            for out, width in matrices(shape)
        ]

    def work(self, num_rows: int) -> Callable[[], object]:
        """Return a call of all GEMMs with num_rows rows, on their own buffers."""
        import torch

        inputs = {
            width: torch.randn(num_rows, width, generator=self._generator, device=self._device).bfloat16()
            for width in {weight.shape[1] for weight in self._weights}
        }
        outputs = {
            out: torch.empty(num_rows, out, dtype=torch.bfloat16, device=self._device)
            for out in {weight.shape[0] for weight in self._weights}
        }

        def run() -> None:
            for weight in self._weights:
                torch.mm(inputs[weight.shape[1]], weight.T, out=outputs[weight.shape[0]])

        return run


def _write(bench: Bench, rows: list[Row]) -> None:
    bench.record.value("rows", [asdict(row) | {"gain": row.gain} for row in rows])
    bench.record.table(
        "Draft loop and verification, matrix products only",
        ("draft x verify rows", "SMs", "draft ms", "together", "verify ms", "together", "serial ms", "gain"),
        [
            (
                f"{row.draft_rows} x {row.verify_rows}",
                row.division,
                f"{row.draft_ms:.2f}",
                f"{row.draft_together_ms:.2f} ({row.draft_together_ms / row.draft_ms:.2f})",
                f"{row.verify_ms:.2f}",
                f"{row.verify_together_ms:.2f} ({row.verify_together_ms / row.verify_ms:.2f})",
                f"{row.serial_ms:.2f}",
                f"{row.gain:.2f}",
            )
            for row in rows
        ],
        f"{DRAFT_LEN} draft steps next to one verification. SMs: granted to draft/target; the first line of a load is "
        "two streams that share every SM. gain: one after the other on every SM, over the later of the two ends.",
    )
    series: dict[str, dict[float, float]] = {}
    for row in rows:
        series.setdefault(row.division, {})[float(row.verify_rows)] = row.gain
    bench.record.plot("Overlap against serial", "verified rows", "gain", series)
