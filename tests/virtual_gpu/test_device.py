"""The rules that the virtual GPU enforces, each shown by code that breaks it."""

from __future__ import annotations

import ctypes
import functools
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest
import torch

from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.errors import FaserError
from faser_trtllm.ops.cuda.driver import Module, load_driver
from faser_trtllm.ops.cuda.quantize_rows import NUM_THREADS, quantize_rows
from faser_trtllm.partition.green_context import GpuPartition, GpuPartitions
from tests.virtual_gpu.device.counters import Counters
from tests.virtual_gpu.device.library import compile_stem, driver
from tests.virtual_gpu.device.runtime import VirtualRuntime
from tests.virtual_gpu.device.streams import Event, Graph, call
from tests.virtual_gpu.process import VirtualGpuProcess
from tests.virtual_gpu.soak import in_use

pytestmark = pytest.mark.slow

SEEDS = range(8)


def _marks_of_two_streams(seed: int) -> list[int]:
    """Two streams write to one log."""
    driver().seed(seed)
    runtime = VirtualRuntime()
    with GpuPartitions([32]) as made:
        pair = made.pairs[0]
        log, place = torch.zeros(12, device=runtime.device), torch.zeros(1, dtype=torch.int64, device=runtime.device)
        runtime.wait()
        for number in range(6):
            for partition, first in ((pair.draft, 100.0), (pair.target, 200.0)):
                with runtime.on(partition):
                    log.index_copy_(0, place, torch.full((1,), first + number, device=runtime.device))
                    place.add_(1)
        for partition in (pair.draft, pair.target):
            with runtime.on(partition):
                runtime.wait()
        return [int(x) for x in log.tolist()]


def test_streams_run_in_their_own_order_only(gpu: VirtualGpuProcess) -> None:
    """Which stream goes first changes with the seed, the order within one does not."""
    orders = set()
    for seed in SEEDS:
        marks = gpu.run(_marks_of_two_streams, seed)
        # Between a mark and the step of the place, the other stream may write to the same place: a race shows.
        assert [x for x in marks if 100 <= x < 200] == sorted(x for x in marks if 100 <= x < 200)
        assert [x for x in marks if x >= 200] == sorted(x for x in marks if x >= 200)
        orders.add(tuple(marks))
    assert len(orders) > 1


def _lazily(runtime: Runtime, partition: GpuPartition) -> tuple[list[float], list[float]]:
    host, back = (runtime.host_tensor((3,), torch.float32) for _ in range(2))
    with runtime.on(partition):
        x = torch.zeros(3, device=runtime.device)
        host[:] = 1
        x.copy_(host, non_blocking=True)
        host[:] = 2  # before the copy has run
        back.copy_(x, non_blocking=True)
        before = back.tolist()
        runtime.wait()
    return before, back.tolist()


def _lazy_copies() -> tuple[list[float], list[float]]:
    with GpuPartitions([32]) as made:
        return _lazily(VirtualRuntime(), made.whole)


def test_copies_run_when_they_are_waited_for(gpu: VirtualGpuProcess) -> None:
    """So page-locked memory that is written too early or read too early shows."""
    assert gpu.run(_lazy_copies) == ([0.0] * 3, [2.0] * 3)


def _sent_in_a_row(waits: bool) -> list[list[int]]:
    """Return what the device got of ten uploads through one Staging, with nothing else waited for."""
    runtime = VirtualRuntime()
    with GpuPartitions([32]) as made, runtime.on(made.whole):
        staging = Staging(runtime, 4)
        if not waits:
            runtime.mark = lambda: lambda: None  # type: ignore[method-assign]
        got = torch.zeros((10, 4), dtype=torch.int32, device=runtime.device)
        for number in range(10):
            staging.fill()[:] = number
            staging.send(4)
            got[number].copy_(staging.device)
        return [[int(x) for x in row] for row in got.tolist()]


def test_staging_never_rewrites_what_a_copy_has_yet_to_read(gpu: VirtualGpuProcess) -> None:
    expected = [[number] * 4 for number in range(10)]
    assert gpu.run(_sent_in_a_row, True) == expected
    assert gpu.run(_sent_in_a_row, False) != expected, "the same without its waits is caught"


def _captured(forbidden: str) -> str:
    runtime = VirtualRuntime()
    with GpuPartitions([32]) as made, runtime.on(made.whole):
        x = torch.ones(4, device=runtime.device)
        runtime.wait()
        work = {
            "wait": runtime.wait,
            "read": lambda: x[0].item(),
            "index": lambda: x[(x > 0).sum()],
            "mask": lambda: x[x > 0],
            "page-locked memory": lambda: runtime.host_tensor((2,), torch.int32),
            "memory": lambda: call("cuMemAlloc", 64),
            "from the host": lambda: x.copy_(torch.zeros(4)),
            "nothing": lambda: x.add_(1),
        }[forbidden]
        try:
            runtime.capture(work)
        except (FaserError, RuntimeError) as error:
            return str(error)
        return "captured"


@pytest.mark.parametrize(
    "forbidden", ["wait", "read", "index", "mask", "page-locked memory", "memory", "from the host", "nothing"]
)
def test_a_capture_refuses_what_cuda_refuses(gpu: VirtualGpuProcess, forbidden: str) -> None:
    said = gpu.run(_captured, forbidden)
    if forbidden == "nothing":
        assert said == "captured"
    elif forbidden == "mask":
        assert "nonzero" in said, "the shape of its result is not known before it runs"
    else:
        assert "STREAM_CAPTURE" in said


def _replays() -> tuple[list[float], dict[str, int], bool]:
    runtime = VirtualRuntime()
    with GpuPartitions([32]) as made, runtime.on(made.pairs[0].draft):
        x, total = torch.ones(2, device=runtime.device), torch.zeros(2, device=runtime.device)
        runtime.wait()
        before = Counters.now()
        graph = runtime.capture(lambda: total.add_(x * 2))
        untouched = total.tolist() == [0.0, 0.0]
        for value in (1.0, 10.0):
            x.fill_(value)
            graph()
        found = total.tolist()
        return found, Counters.now().since(before).graphs, untouched


def test_a_graph_runs_on_what_memory_holds_when_it_is_launched(gpu: VirtualGpuProcess) -> None:
    assert gpu.run(_replays) == ([22.0, 22.0], {"0+32": 2}, True)


def _graphs_in_a_pool() -> tuple[list[int], list[float]]:
    """Return the memory, in tensors, that two graphs of one runtime and one of another take, and the values that they
    compute. Each graph has four tensors."""
    pools = [VirtualRuntime(), VirtualRuntime()]
    size, device = 1 << 18, pools[0].device
    with GpuPartitions([32]) as made, pools[0].on(made.whole):
        total, found, graphs = torch.zeros(size, device=device), [in_use()[0]], []

        def work(times: int) -> None:
            x = total + 1
            for _ in range(3):
                x = x * times
            total.copy_(x)

        for times, runtime in ((2, pools[0]), (3, pools[0]), (2, pools[1])):
            graphs.append(runtime.capture(functools.partial(work, times)))
            found.append(in_use()[0])
        for graph in (graphs[0], graphs[1], graphs[0]):
            graph()
        values = sorted(set(total.tolist()))
        del graphs, graph, pools, runtime
        found.append(in_use()[0])
    return [(number - found[0]) // total.nbytes for number in found[1:]], values


def test_graphs_of_a_runtime_share_their_memory(gpu: VirtualGpuProcess) -> None:
    """A tensor takes the memory that another has left, in the same graph and in later ones; the last graph frees it."""
    taken, values = gpu.run(_graphs_in_a_pool)
    assert taken == [2, 2, 4, 0]
    assert values == [(((0 + 1) * 8 + 1) * 27 + 1) * 8]


def _quantized(num_rows_of_memory: int, num_threads: int = NUM_THREADS) -> bool:
    """Return whether the kernel, launched through the driver, gives what torch's arithmetic does."""
    runtime = VirtualRuntime()
    with (
        GpuPartitions([32]) as made,
        Module(compile_stem("quantize_rows", "sm_90").path) as module,
        runtime.on(made.whole),
    ):
        x = torch.randn((5, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
        on_device = x.to(runtime.device)
        values = torch.empty((num_rows_of_memory, 64), dtype=torch.float8_e4m3fn, device=runtime.device)
        scales = torch.empty((5, 1), device=runtime.device)
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (on_device, values, scales)]
        arguments = [addresses[0], ctypes.c_int32(5), ctypes.c_int32(64), *addresses[1:]]
        module.launch("quantize_rows", (5, 1, 1), (num_threads, 1, 1), arguments, runtime.stream())
        runtime.wait()
        return bool((values.cpu().float() == quantize_rows(x).values.float()).all())


def test_kernels_run_as_they_are_launched() -> None:
    with VirtualGpuProcess() as gpu:
        assert gpu.run(_quantized, 5)
        with pytest.raises(FaserError, match="cuLaunchKernel failed with CUDA_ERROR_INVALID_VALUE for quantize_rows"):
            gpu.run(_quantized, 5, 2048)  # threads are more than a block has
        with pytest.raises(FaserError, match="ILLEGAL_ADDRESS"):
            gpu.run(_quantized, 4)  # writes beside its memory
        with pytest.raises(FaserError, match="ILLEGAL_ADDRESS"):
            gpu.run(_quantized, 5)  # as on a GPU, nothing runs any more


def _freed_too_early(seed: int, on_other_stream: bool) -> bool:
    """Return whether a read by address still finds the values after a free in the order of the memory's own stream."""
    driver().seed(seed)
    runtime = VirtualRuntime()
    with GpuPartitions([32]) as made:
        draft, target = made.pairs[0].draft, made.pairs[0].target
        with runtime.on(draft):
            out = torch.zeros(64, device=runtime.device)
            x = torch.ones(64, device=runtime.device)
            runtime.wait()
        reader = target if on_other_stream else draft
        call("cuMemcpyDtoDAsync", out.data_ptr(), x.data_ptr(), 256, reader.stream)
        del x
        for stream in (draft, reader):
            with runtime.on(stream):
                runtime.wait()
        with runtime.on(draft):
            return out.tolist() == [1.0] * 64


def _event_order(seed: int, waits: bool) -> list[float]:
    """One stream writes twice and another reads; waits: for the event between the two writes."""
    driver().seed(seed)
    runtime = VirtualRuntime()
    with GpuPartitions([32]) as made:
        draft, target = made.pairs[0].draft, made.pairs[0].target
        x, y = torch.zeros(1, device=runtime.device), torch.zeros(1, device=runtime.device)
        runtime.wait()
        with runtime.on(draft):
            x.fill_(1.0)
            event = runtime.now()
        with runtime.on(target):
            if waits:
                call("cuStreamWaitEvent", target.stream, event.handle, 0)
            y.copy_(x)
            runtime.wait()
            return y.tolist()


def test_an_event_orders_two_streams(gpu: VirtualGpuProcess) -> None:
    assert all(gpu.run(_event_order, seed, True) == [1.0] for seed in SEEDS)
    assert any(gpu.run(_event_order, seed, False) == [0.0] for seed in SEEDS)


def test_memory_is_freed_in_the_order_of_its_stream() -> None:
    with VirtualGpuProcess() as gpu:
        assert all(gpu.run(_freed_too_early, seed, False) for seed in SEEDS)
        with pytest.raises(FaserError, match="ILLEGAL_ADDRESS"):  # another stream's use is a race, which a seed shows
            [gpu.run(_freed_too_early, seed, True) for seed in SEEDS]


def _green_stream() -> tuple[Any, int]:
    """A green context, and a stream of it."""
    device, sm = call("cuDeviceGet", 0), load_driver().CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    groups, _, _ = call("cuDevSmResourceSplitByCount", 1, call("cuDeviceGetDevResource", device, sm), 0, 32)
    context = call("cuGreenCtxCreate", call("cuDevResourceGenerateDesc", [groups[0]], 1), device, 1)
    return context, int(call("cuGreenCtxStreamCreate", context, 1, 0))


def _destroyed(used: str, stream_first: bool) -> str:
    """Return what the driver says to a use of a stream after its green context was destroyed."""
    runtime = VirtualRuntime()
    context, stream = _green_stream()
    with runtime.on(GpuPartition("green", stream, 32)):
        x, event = torch.ones(4, device=runtime.device), Event()
        runtime.wait()
        graph = Graph(lambda: x.add_(1))
    if stream_first:
        call("cuStreamDestroy", stream)
    call("cuGreenCtxDestroy", context)
    uses = {
        "event": lambda: call("cuEventRecord", event.handle, stream),
        "wait": lambda: call("cuStreamSynchronize", stream),
        "copy": lambda: call("cuMemcpyDtoDAsync", x.data_ptr(), x.data_ptr() + 8, 8, stream),
        "graph": graph.replay,  # on another stream
        "destroy": lambda: call("cuStreamDestroy", stream),
    }
    try:
        uses[used]()
    except FaserError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("stream_first", [True, False])
@pytest.mark.parametrize("used", ["event", "wait", "copy", "graph", "destroy"])
def test_streams_of_a_destroyed_context_are_refused(gpu: VirtualGpuProcess, used: str, stream_first: bool) -> None:
    assert gpu.run(_destroyed, used, stream_first).endswith("failed with CUDA_ERROR_CONTEXT_IS_DESTROYED")


def _page_locked_outlives(what: str) -> None:
    """torch's page-locked memory, which a copy on a stream has used, is freed after the stream."""
    runtime = VirtualRuntime()
    context, stream = _green_stream()
    with GpuPartitions([32]) as made:
        partition = made.pairs[0].draft if what == "partitions" else GpuPartition("green", stream, 32)
        with runtime.on(partition):
            on_host = torch.zeros(4, pin_memory=True)
            torch.zeros(4, device=runtime.device).copy_(on_host, non_blocking=True)
            runtime.wait()
    if what == "context":
        call("cuStreamDestroy", stream)
        call("cuGreenCtxDestroy", context)
    del on_host


def test_torch_aborts_where_a_stream_is_gone_that_used_its_page_locked_memory() -> None:
    with VirtualGpuProcess() as gpu:
        gpu.run(_page_locked_outlives, "partitions")
        with pytest.raises(BrokenProcessPool):
            gpu.run(_page_locked_outlives, "context")


def _host_bytes() -> list[int]:
    """Page-locked bytes before, with and after a tensor of ours that an array outlives, and one of a failed device."""
    runtime, found = VirtualRuntime(), [Counters.now().host_bytes]
    array = runtime.host_tensor((2, 3), torch.float32).numpy()
    assert array.tolist() == [[0.0] * 3] * 2
    found.append(Counters.now().host_bytes)
    del array
    found.append(Counters.now().host_bytes)
    tensor = runtime.host_tensor((100,), torch.int32)
    torch.zeros(100, dtype=torch.int32, device=runtime.device).copy_(tensor, non_blocking=True)
    driver().fail()
    del tensor
    found.append(Counters.now().host_bytes)
    return found


def test_page_locked_memory_of_ours_goes_with_who_holds_it() -> None:
    """Without a word of the driver, so that nothing aborts."""
    with VirtualGpuProcess() as gpu:
        before, held, freed, failed = gpu.run(_host_bytes)
    assert (held - before, freed, failed) == (24, before, before)


def _read_by_address(num_bytes: int) -> None:
    """Check memory as the stand-in of TensorRT does before a plan reads a tensor."""
    runtime = VirtualRuntime()
    x = torch.zeros(4, device=runtime.device)
    driver().check_memory("x of a plan", x.data_ptr(), num_bytes)


def test_what_a_plan_is_bound_to_must_be_memory(gpu: VirtualGpuProcess) -> None:
    gpu.run(_read_by_address, 16)
    with pytest.raises(FaserError, match="x of a plan uses 17 bytes that are not allocated"):
        gpu.run(_read_by_address, 17)
