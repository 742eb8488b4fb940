"""The kernels of plugins/cuda as nvcc's PTX, interpreted on the CPU and launched like a cubin."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from faser_trtllm.errors import ConfigError
from faser_trtllm.ops.cuda.compiler import compile_stem, find_nvcc, source_dir
from faser_trtllm.ops.cuda.module import Argument, Dim3
from tests.ops.cuda.ptx.interpreter.machine import Machine
from tests.ops.cuda.ptx.interpreter.memory import Memory
from tests.ops.cuda.ptx.interpreter.program import Program


class InterpretedModule:
    """Launcher over host memory; a launch ends before it returns. options: of Machine."""

    def __init__(self, program: Program, memory: Memory, **options) -> None:
        self._machine = Machine(program, memory, **options)

    def launch(self, kernel: str, grid: Dim3, block: Dim3, arguments: Sequence[Argument], stream: int = 0) -> None:
        """As Launcher.launch. A pointer's value is None when it is null."""
        self._machine.launch(kernel, grid, block, [argument.value or 0 for argument in arguments])


class HostMemory(Memory):
    """Global memory is every tensor whose address was taken since this was made, to the byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        address_of = torch.Tensor.data_ptr

        def noted(tensor: torch.Tensor) -> int:
            address = address_of(tensor)
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            self.add_host(address, (last + 1) * tensor.element_size() if tensor.numel() else 0, tensor)
            return address

        monkeypatch.setattr(torch.Tensor, "data_ptr", noted)


@functools.lru_cache(maxsize=2)  # a program's instructions are many objects
def program_of(stem: str, arch: str = "sm_90", fused: bool = True, **defines: int) -> Program:
    """A stem as nvcc compiles it, or a skipped test where there is no nvcc. fused: with multiplications and additions
    in one rounding, which a host compiler does not have."""
    return Program(ptx_of(stem, arch, fused, defines))


def ptx_of(stem: str, arch: str, fused: bool, defines: Mapping[str, int]) -> str:
    """As program_of, the text."""
    try:
        nvcc = find_nvcc()
    except ConfigError as error:
        pytest.skip(str(error))
    if fused:
        return compile_stem(stem, arch, "ptx", defines).path.read_text()
    with tempfile.TemporaryDirectory() as folder:
        target, source = Path(folder) / "unfused.ptx", source_dir() / f"{stem}.cu"
        flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-fmad=false", "-I", str(source_dir())]
        flags += [f"-D{name}={value}" for name, value in defines.items()]
        command = [str(nvcc), "-ptx", f"-arch={arch.replace('sm', 'compute')}", *flags, "-o", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return target.read_text()
