"""The runtime of a GPU engine: streams, events and graphs through torch."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from faser_trtllm.errors import ConfigError
from faser_trtllm.ops.cuda.driver import Module, OnStream, call_driver, device_arch, load_driver, page_locked
from faser_trtllm.ops.cuda.set_conditional import STEM, set_conditional
from faser_trtllm.partition.green_context import GpuPartition

if TYPE_CHECKING:
    import torch

Work = Callable[[], None]
Replay = Callable[[], None]
MIN_TORCH = (2, 11)  # mm with both out_dtype and out


class Runtime(Protocol):
    """Work is enqueued on the stream that on() made current for the calling thread."""

    device: torch.device

    def on(self, partition: GpuPartition) -> AbstractContextManager[Any]:
        """Return a context whose work runs on this partition."""

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed page-locked host memory. Copies from or to it must end before it is released."""

    def wait(self) -> None:
        """Sleep until all work enqueued so far is done."""

    def mark(self) -> Callable[[], None]:
        """Return a function that sleeps until the work enqueued up to now is done."""

    def capture(self, work: Work) -> Replay:
        """Capture the work that `work` enqueues on the current stream, where it must have run once before."""

    def capture_loop(self, begin: Work, step: Work, going: torch.Tensor) -> Replay:
        """Capture `begin` and then `step`, repeated while `going`, int32 [1] on the device, is not 0. Both must have
        run on the current stream before. Raises FaserError or RuntimeError if the driver refuses."""

    def memory_bytes(self) -> int:
        """Return the bytes of device memory that this process holds."""

    def free_bytes(self) -> int:
        """Return the bytes of free device memory."""

    def stream(self) -> int:
        """Return the current stream as a number, for launches outside torch."""

    def now(self) -> Any:
        """Return an event at the current point of the current stream."""

    def ms_between(self, begin: Any, end: Any) -> float:
        """Return the milliseconds between two events that have completed."""


class CapturedGraph(Protocol):
    """The part of torch.cuda.CUDAGraph(keep_graph=True) that we use; it owns the graph and its nodes' memory."""

    def raw_cuda_graph(self) -> int:
        """Return the CUgraph."""


class GraphLoop:
    """A CUDA graph of two captured ones: `begin`, then `step` in a node that repeats while `going` is not 0.

    It runs in the context of the stream that it was captured on. Not run on a GPU: tests make cuda-python's calls on
    the virtual GPU's driver.
    """

    def __init__(
        self,
        stream: Callable[[], int],
        capture: Callable[[Work], CapturedGraph],
        begin: Work,
        step: Work,
        going: torch.Tensor,
    ) -> None:
        """stream: returns the current stream as a number. capture: captures work on it. Raises FaserError or
        RuntimeError if the driver lacks a call."""
        from faser_trtllm.ops.cuda.compiler import compile_stem

        self._driver = driver = load_driver()
        self._stream = stream

        def call(name: str, *arguments: Any) -> Any:  # not a method: the finalizer must not hold a reference to self
            return call_driver(driver, getattr(driver, name), *arguments)

        conditional = driver.CUgraphNodeParams()
        conditional.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node = conditional.conditional
        with ExitStack() as made:
            module = made.enter_context(Module(compile_stem(STEM, device_arch(going.device.index)).path))
            launcher = OnStream(module, stream)
            set_conditional(launcher, None, 0)  # loads the kernel, which a capture might not
            held: list[CapturedGraph] = []
            made.callback(held.clear)
            graph = call("cuGraphCreate", 0)
            made.callback(call, "cuGraphDestroy", graph)
            node.ctx = call("cuStreamGetCtx", driver.CUstream(stream()))
            node.handle = call("cuGraphConditionalHandleCreate", graph, node.ctx, 0, 0)
            node.type, node.size = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE, 1

            def add(to: Any, work: Work) -> Any:
                """Capture `work` as the first node of a graph."""

                def run() -> None:
                    work()
                    set_conditional(launcher, going, int(node.handle))

                held.append(capture(run))
                child = driver.CUgraph(held[-1].raw_cuda_graph())
                return call("cuGraphAddChildGraphNode", to, None, 0, child)

            first = add(graph, begin)
            call("cuGraphAddNode", graph, [first], None, 1, conditional)
            add(node.phGraph_out[0], step)
            self._instance = instance = call("cuGraphInstantiate", graph, 0)
            made.callback(call, "cuGraphExecDestroy", instance)
            # Keep the graph and the memory of the captured ones for as long as the instance.
            weakref.finalize(self, made.pop_all().close).atexit = False

    def launch(self) -> None:
        """Launch the graph on the current stream."""
        call_driver(self._driver, self._driver.cuGraphLaunch, self._instance, self._driver.CUstream(self._stream()))


class CudaRuntime:
    """The runtime of one GPU. Waiting sleeps on an event and leaves the CPU to the thread of the other stream."""

    def __init__(self, ordinal: int = 0) -> None:
        """Raises ConfigError if torch or its CUDA is missing."""
        # With the few default queues, work of two streams could wait for each other. CUDA reads this when it starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        try:
            import torch
        except ImportError as error:
            raise ConfigError(
                "torch is not installed, and GPU backends need it; pip install a CUDA build of torch"
            ) from error
        if tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < MIN_TORCH:
            raise ConfigError(
                f"torch {torch.__version__} is too old, GPU backends need {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer; "
                "pip install a newer CUDA build of torch"
            )
        if not torch.cuda.is_available():
            raise ConfigError(
                f"torch {torch.__version__} finds no CUDA GPU, and GPU backends need one; install a CUDA build of "
                "torch on a machine with an NVIDIA GPU, or build engines with --backend cpu"
            )
        torch.zeros(1, device=f"cuda:{ordinal}")  # creates the primary context, before any green one
        self.device = torch.device("cuda", ordinal)
        self._torch: Any = torch
        self._streams: dict[int, Any] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def on(self, partition: GpuPartition) -> AbstractContextManager[Any]:
        stream = self._streams.get(partition.stream)
        if stream is None:
            stream = self._torch.cuda.ExternalStream(partition.stream, device=self.device)
            self._streams[partition.stream] = stream
        context: AbstractContextManager[Any] = self._torch.cuda.stream(stream)
        return context

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return page_locked(shape, dtype)

    def wait(self) -> None:
        self.mark()()

    def mark(self) -> Callable[[], None]:
        event = self._torch.cuda.Event(blocking=True)
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def capture(self, work: Work) -> Replay:
        replay: Replay = self._captured(work).replay
        return replay

    def capture_loop(self, begin: Work, step: Work, going: torch.Tensor) -> Replay:
        capture = functools.partial(self._captured, keep_graph=True)
        return GraphLoop(self.stream, capture, begin, step, going).launch

    def _captured(self, work: Work, keep_graph: bool = False) -> Any:
        graph = self._torch.cuda.CUDAGraph(keep_graph)
        stream = self._torch.cuda.current_stream(self.device)
        # Nodes keep the context of the stream they were captured on, so each partition has its own graph. An engine's
        # graphs never run concurrently, so they share a pool. thread_local: other threads may allocate meanwhile.
        with self._torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph

    def memory_bytes(self) -> int:
        free, total = self._torch.cuda.mem_get_info(self.device)
        return int(total - free)

    def free_bytes(self) -> int:
        return int(self._torch.cuda.mem_get_info(self.device)[0])

    def now(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event

    def ms_between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end))

    def stream(self) -> int:
        return int(self._torch.cuda.current_stream(self.device).cuda_stream)
