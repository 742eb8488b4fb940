"""The shapes that the cuda backend runs: those of a start-up, and those that are first seen while it serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.engine.buckets import Buckets
from faser_trtllm.engine.gpu.device import CudaGpu
from faser_trtllm.ops.cuda.driver import Module
from tests.engine.cuda.host_executor import generate
from tests.virtual_gpu.device.library import driver
from tests.virtual_gpu.device.runtime import VirtualRuntime
from tests.virtual_gpu.device.streams import current_stream

LAYER_KERNELS = ("append_kv", "gated_silu", "verify_attention")
Shape = tuple[Any, ...]
"""A product of torch or a kernel of a layer: its name, its stream, the shapes of its operands or its grid."""


@dataclass(frozen=True)
class Served:
    """at_start: shapes run before the first request. first_seen: others. launched: how many there were of either."""

    tokens: list[list[int]]
    stats: dict[str, float]
    at_start: set[Shape]
    first_seen: set[Shape]
    num_launched: int


def serve(
    engines: EngineDir,
    policy: str,
    requests: Any,
    *,
    is_padded: bool = True,
    has_graphs: bool = True,
    **options: Any,
) -> Served:
    """Generate as generate_cuda does. is_padded: whether passes are padded, as engines pad them; else a pass has
    the rows that it has. has_graphs: whether there is memory for any."""
    driver().seed(0)
    torch.manual_seed(0)
    recorder = _Recorder()
    at_start: list[Shape] = []
    with ExitStack() as stack:
        if not is_padded:
            stack.enter_context(_replaced(Buckets, "rows", lambda self, num_rows: num_rows))
        if not has_graphs:
            stack.enter_context(_replaced(VirtualRuntime, "free_bytes", lambda self: 0))
        stack.enter_context(recorder.recording())
        gpu = stack.enter_context(CudaGpu())
        tokens, stats = generate(
            engines, policy, requests, gpu=gpu, opened_all=lambda: at_start.extend(recorder.shapes), **options
        )
    while_serving = recorder.shapes[len(at_start) :]
    return Served(tokens, stats, set(at_start), set(while_serving) - set(at_start), len(while_serving))


class _Recorder(TorchDispatchMode):
    """Recorder of the shapes that are launched one by one; a replay launches what was captured."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[Shape] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.name():
            operands = [value for value in args if isinstance(value, torch.Tensor)]
            self.shapes.append((func.name(), current_stream(), *(tuple(each.shape) for each in operands)))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def recording(self) -> Iterator[None]:
        launch = Module.launch

        def recorded(module: Module, kernel: str, grid: Any, block: Any, arguments: Any, stream: int = 0) -> None:
            if kernel.startswith(LAYER_KERNELS):
                self.shapes.append((kernel, stream, grid))
            launch(module, kernel, grid, block, arguments, stream)

        with _replaced(Module, "launch", recorded), self:
            yield


@contextmanager
def _replaced(owner: type, name: str, function: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)
