"""Cases of ops whose reference takes the same arguments, and runs on copies of them on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.attention import BF16_ERROR, relative_error
from benchmarks.gpu.kernels.case import KernelCase
from benchmarks.gpu.machine import num_copies
from faser_trtllm.ops.cuda import quantize_rows

if TYPE_CHECKING:
    from torch import Tensor

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

    def integers(self, end: int, *shape: int) -> Tensor:
        """Return random numbers of 0 to end - 1."""
        import torch

        return torch.randint(0, end, shape, generator=self._generator, device=self.device).to(torch.int32)

    def zeros(self, *shape: int, dtype: str = "int32") -> Tensor:
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def host(self, array: Any) -> Tensor:
        import torch

        return torch.from_numpy(array).to(self.device)

    def scaled_rows(self, num_rows: int, width: int) -> quantize_rows.ScaledRows:
        values = self.zeros(num_rows, width, dtype="float8_e4m3fn")
        return quantize_rows.ScaledRows(values, self.zeros(num_rows, 1, dtype="float32"))


def op_case(
    bench: Bench,
    op: str,
    shape: str,
    stem: str,
    functions: Functions,
    make: Make,
    num_outputs: int,
    num_bytes: float,
    num_issued: float = 0.0,
    peer: Callable[..., object] | None = None,
    *,
    is_exact: bool = False,
) -> KernelCase:
    """Return the case of functions: launch and reference; the last num_outputs of make()'s arguments are compared.

    peer: called with the same arguments for comparison. is_exact: no bit may differ.
    """
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
        return max(_error(found, expected, is_exact) for found, expected in outputs)

    calls = None
    if launcher is not None:
        calls = tuple(lambda arguments=arguments: launch(launcher, *arguments) for arguments in sets)
    peers = None
    if peer is not None:
        peers = tuple(lambda arguments=arguments: peer(*arguments) for arguments in sets)
    return KernelCase(op, shape, check, calls, num_bytes, peer=peers, num_issued=num_issued)


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


def _error(found: Tensor, wanted: Tensor, is_exact: bool) -> float:
    if not wanted.is_floating_point():
        return 0.0 if found.equal(wanted) else float("inf")
    if is_exact:
        return 0.0 if found.float().equal(wanted.float()) else float("inf")
    return relative_error(found, wanted) / BF16_ERROR
