"""The modeled time of a kernel's case, from its launches, which are recorded without a GPU, and its compiled code.

MODELED, nothing runs. A case takes (a^p + b^p + c^p)^(1/p) us, for a: its launches and the walk of its blocks through
contexts, b: its bytes, and c: the instructions of long stretches that all warps execute. The constants were chosen once
for all kernels, from times of an H100 and an H200 (2026-11-26).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.case import KernelCase
from benchmarks.gpu.kernels.cubin import Code, codes_of
from benchmarks.gpu.options import GpuBenchOptions
from benchmarks.gpu.report.record import Record
from faser_trtllm.core.cost_table import Fingerprint
from faser_trtllm.engine.opening import OpenedEngines, OpenRequest
from faser_trtllm.errors import FaserError
from faser_trtllm.ops.cuda.compiler import compile_stem
from faser_trtllm.ops.cuda.driver import Argument, Dim3, OnStream
from lab.costmodel.gpu import Gpu

if TYPE_CHECKING:
    import torch

LAUNCH_US = 3.5  # of a launch in a graph, with a block's first load and last store
ITEM_US = 2.0  # of an item of attention's work before and after its walk, and of the merge of a tile's chunks
INSTRUCTION_NS = 1.5  # of a walk, for a warp that shares its scheduler with few: 2.5 cycles
WALK_TOKENS = 64  # positions of an iteration of a block's walk
MEMORY_SHARE = 0.78  # of the bandwidth of a sum over large arrays
ISSUED_PER_US = 3400.0  # warp instructions of an SM: 2 per cycle
POWER = 1.5
Cases = Callable[[Bench], Iterator[KernelCase]]
Times = Mapping[tuple[str, str], float]  # us by op and shape


@dataclass(frozen=True)
class Launch:
    """A recorded launch."""

    stem: str
    defines: tuple[tuple[str, int], ...]
    kernel: str
    grid: Dim3
    num_threads: int

    @property
    def num_blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def code(self, arch: str) -> Code:
        return _codes(self.stem, self.defines, arch)[self.kernel]


@functools.cache
def _codes(stem: str, defines: tuple[tuple[str, int], ...], arch: str) -> dict[str, Code]:
    return codes_of(compile_stem(stem, arch, defines=dict(defines)))


class RecordingMachine:
    """A Machine whose tensors have shapes and no memory, and whose launches are only recorded."""

    device = "meta"
    is_gpu = False
    l2_bytes = 0

    def __init__(self, num_sms: int) -> None:
        self.num_sms = num_sms
        self.launches: list[Launch] = []

    def generator(self, seed: int) -> torch.Generator:
        import torch

        return torch.Generator().manual_seed(seed)

    def launcher(self, stem: str, defines: Mapping[str, int] | None = None) -> OnStream | None:
        return OnStream(_Recorder(self.launches, stem, tuple((defines or {}).items())), self.stream)

    def stream(self) -> int:
        return 0

    def compile(self, wanted: Sequence[tuple[str, Mapping[str, int] | None]]) -> None:
        raise FaserError("a machine that records launches compiles nothing")

    def synchronize(self) -> None:
        """Do nothing."""

    def fingerprint(self, made_of: bytes) -> Fingerprint:
        return Fingerprint("no GPU", "recorded", self.num_sms, hashlib.sha256(made_of).hexdigest())

    def open_engines(self, request: OpenRequest, stack: ExitStack) -> OpenedEngines:
        raise FaserError("a machine that records launches opens no engines")

    def time_ms(self, calls: Sequence[Callable[[], object]], num_repeats: int = 1) -> float:
        raise FaserError("a machine that records launches times nothing")


class _Recorder:
    def __init__(self, launches: list[Launch], stem: str, defines: tuple[tuple[str, int], ...]) -> None:
        self._launches, self._stem, self._defines = launches, stem, defines

    def launch(self, kernel: str, grid: Dim3, block: Dim3, arguments: Sequence[Argument], stream: int = 0) -> None:
        self._launches.append(Launch(self._stem, self._defines, kernel, grid, block[0] * block[1] * block[2]))


@dataclass(frozen=True)
class RecordedCase:
    """A case with its launches."""

    case: KernelCase
    launches: tuple[Launch, ...]


def recorded(options: GpuBenchOptions, families: Mapping[str, Cases], num_sms: int = 132) -> list[RecordedCase]:
    """Return the cases of the section "kernels", launched once on a RecordingMachine."""
    found: list[RecordedCase] = []
    for cases in families.values():
        machine = RecordingMachine(num_sms)
        for case in cases(Bench(options, machine, Record())):
            assert case.launches is not None
            case.launches[0]()
            found.append(RecordedCase(case, tuple(machine.launches)))
            machine.launches.clear()
    return found


def modeled_us(recorded_case: RecordedCase, gpu: Gpu, arch: str = "sm_90") -> float:
    """Return the modeled time of a case's launches in a graph."""
    case, launches = recorded_case.case, recorded_case.launches
    start_us = LAUNCH_US * len(launches) + _walk_us(case, launches[0], gpu, arch)
    memory_us = (case.num_bytes + case.more_bytes) / (1e6 * MEMORY_SHARE * gpu.gb_per_ms)
    issue_us = case.num_issued / (ISSUED_PER_US * gpu.num_sms)
    found: float = (start_us**POWER + memory_us**POWER + issue_us**POWER) ** (1 / POWER)
    return found


def roofline_us(case: KernelCase, gpu: Gpu) -> float:
    """Return the time to move every byte once, or to compute, at the cost model's rates."""
    return max(case.num_bytes / (1e6 * gpu.gb_per_ms), case.num_flops / (1e6 * gpu.tflops))


def _walk_us(case: KernelCase, launch: Launch, gpu: Gpu, arch: str) -> float:
    """Return the longest walk of a block, or of all that one place on an SM runs if that is longer."""
    if not case.walks:
        return 0.0
    code = launch.code(arch)
    each_us = [ITEM_US + 1e-3 * INSTRUCTION_NS * code.walk * -(-tokens // WALK_TOKENS) for _, tokens in case.walks]
    places = min(launch.num_blocks, gpu.num_sms * code.blocks_per_sm(launch.num_threads))
    total_us = sum(number * us for (number, _), us in zip(case.walks, each_us, strict=True))
    merge_us = ITEM_US if len(case.walks) > 1 else 0.0
    return max(*each_us, total_us / places) - ITEM_US + merge_us


def times_of(cases: Sequence[RecordedCase], gpu: Gpu, arch: str = "sm_90") -> dict[tuple[str, str], float]:
    """Return the modeled us of cases by op and shape."""
    return {(each.case.op, each.case.shape): modeled_us(each, gpu, arch) for each in cases}
