"""Loops in graphs on the virtual GPU: what GraphLoop makes of the driver's calls, and the rules of conditional nodes,
each shown by code that breaks it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from faser_trtllm.errors import FaserError
from faser_trtllm.ops.cuda.driver import Module, load_driver
from faser_trtllm.ops.cuda.set_conditional import set_conditional
from faser_trtllm.partition.green_context import GpuPartitions
from tests.support.effort import pick
from tests.virtual_gpu.device.counters import Counters
from tests.virtual_gpu.device.library import compile_stem, driver
from tests.virtual_gpu.device.runtime import VirtualRuntime
from tests.virtual_gpu.device.streams import Graph, call
from tests.virtual_gpu.process import VirtualGpuProcess
from tests.virtual_gpu.soak import in_use

pytestmark = pytest.mark.slow

DRAFT, TARGET = "0+32", "32+100"


def _rounds(seed: int, launches: list[int]) -> tuple[list[int], Counters]:
    """A loop on one partition that begins with each of these numbers and takes one off per round; another loop runs on
    the other partition at the same time -> rounds so far after each launch, and what was counted until the last."""
    driver().seed(seed)
    runtime = VirtualRuntime()
    with GpuPartitions([32]) as made:
        loops = []
        for partition in (made.pairs[0].draft, made.pairs[0].target):
            with runtime.on(partition):
                start, going, done = (torch.zeros(1, dtype=torch.int32, device=runtime.device) for _ in range(3))
                runtime.wait()

                def begin(going: torch.Tensor = going, start: torch.Tensor = start) -> None:
                    going.copy_(start)

                def step(going: torch.Tensor = going, done: torch.Tensor = done) -> None:
                    going.sub_(torch.ones_like(going))
                    done.add_(1)

                loops.append((partition, start, done, runtime.capture_loop(begin, step, going)))
        found = []
        for partition, _, done, _ in loops:
            with runtime.on(partition):  # the capture ran the loop once, which counts until it has ended
                done.zero_()
                runtime.wait()
        before = Counters.now()
        for number in launches:
            for partition, start, _, launch in loops:
                with runtime.on(partition):
                    start.fill_(number)
                    launch()
        launched = Counters.now().since(before)
        assert launched.copies == launched.waits == {}, "nothing is read to launch them"
        for partition, *_ in loops:
            with runtime.on(partition):
                runtime.wait()
        counted = Counters.now().since(before)
        for partition, _, done, _ in loops:
            with runtime.on(partition):
                found.append(int(done.item()))
        return found, counted


def test_a_step_runs_for_as_long_as_the_device_says(gpu: VirtualGpuProcess) -> None:
    for seed in range(3):
        found, counted = gpu.run(_rounds, seed, [3, 0, 5])
        assert found == [8, 8]
        assert counted.graphs == {DRAFT: 3, TARGET: 3}
        for side in (DRAFT, TARGET):
            work = counted.work[side]
            assert work["aten.sub_.Tensor"] == 8, "a step that is skipped launches nothing"
            assert counted.kernels(side) == {"set_conditional": 3 + 8}
            assert work["conditional node"] == 3 + 8


def _left_behind() -> int:
    """Bytes of the device that a loop whose steps allocate leaves there once nobody holds it."""

    def captured(runtime: VirtualRuntime) -> None:
        going = torch.zeros(1, dtype=torch.int32, device=runtime.device)
        runtime.capture_loop(lambda: None, lambda: going.sub_(torch.ones_like(going)), going)()
        runtime.wait()

    runtime = VirtualRuntime()
    with GpuPartitions([32]) as made, runtime.on(made.pairs[0].draft):
        captured(runtime)  # loads what stays
        before = in_use()
        captured(runtime)
        return in_use()[0] - before[0]


def test_a_loop_leaves_no_memory_behind(gpu: VirtualGpuProcess) -> None:
    assert gpu.run(_left_behind) == 0


class _Parts:
    """A loop made of the driver's own calls; `broken` names the call that is made wrongly."""

    def __init__(self, broken: str) -> None:
        self.broken, self.runtime, self.bindings = broken, VirtualRuntime(), load_driver()

    def run(self) -> None:
        with (
            GpuPartitions([32]) as made,
            Module(compile_stem("set_conditional", "sm_90").path) as module,
            self.runtime.on(made.pairs[0].draft),
        ):
            self.module, self.here, self.there = module, made.pairs[0].draft, made.pairs[0].target
            self.going = torch.ones(1, dtype=torch.int32, device=self.runtime.device)
            self.runtime.wait()
            self.graph, self.other = call("cuGraphCreate", 0), call("cuGraphCreate", 0)
            self.context = call("cuStreamGetCtx", self.here.stream)
            self.handle, self.others = self.condition(self.graph), self.condition(self.other)
            self.build()

    def is_broken(self, what: str) -> bool:
        return self.broken == what

    def condition(self, graph: Any) -> int:
        return int(call("cuGraphConditionalHandleCreate", graph, self.context, 0, 0))

    def captured(self, *, handle: int, value: int, threads: int = 1, elsewhere: bool = False) -> Graph:
        """A graph that sets the condition to 0, or to 1 if value is."""

        def work() -> None:
            self.going.fill_(value)
            arguments = _arguments(self.going, handle)
            self.module.launch("set_conditional", (1, 1, 1), (threads, 1, 1), arguments, self.runtime.stream())

        with self.runtime.on(self.there if elsewhere else self.here):
            return Graph(work, keep_graph=True)

    def child(self, graph: Any, child: Any, dependencies: list[Any]) -> Any:
        raw = self.bindings.CUgraph(child.raw_cuda_graph() if isinstance(child, Graph) else int(child))
        return call("cuGraphAddChildGraphNode", graph, dependencies, len(dependencies), raw)

    def loop(self, handle: int, dependencies: list[Any], context: Any = None) -> tuple[Any, Any]:
        """Return the node and its body."""
        parameters = self.bindings.CUgraphNodeParams()
        parameters.type = self.bindings.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node = parameters.conditional
        node.handle, node.ctx = handle, context or self.context
        node.type, node.size = self.bindings.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE, 1
        made = call("cuGraphAddNode", self.graph, dependencies, None, len(dependencies), parameters)
        return made, node.phGraph_out[0]

    def build(self) -> None:
        set_by_begin = self.others if self.is_broken("another graph's condition is set") else self.handle
        begin = self.captured(
            handle=set_by_begin,
            value=1,
            threads=2 if self.is_broken("threads race") else 1,
            elsewhere=self.is_broken("it is set in another context"),
        )
        step = self.captured(
            handle=self.handle,
            value=int(self.is_broken("it does not end")),
            elsewhere=self.is_broken("its body is another context's"),
        )
        first = self.child(self.graph, begin, [])
        where = call("cuStreamGetCtx", self.there.stream) if self.is_broken("the node is another context's") else None
        handle = self.others if self.is_broken("the condition is another graph's") else self.handle
        node, body = self.loop(handle, [] if self.is_broken("it does not wait") else [first], where)
        if self.is_broken("two nodes share a condition"):
            self.loop(self.handle, [node])
        if self.is_broken("a condition has no node"):
            self.condition(self.graph)
        self.child(body, step, [])
        if self.is_broken("it is a child"):
            self.child(self.other, self.graph, [])
        if self.is_broken("nothing has set it"):
            begin = self.captured(handle=self.others, value=1)
            self.graph = call("cuGraphCreate", 0)
            _, body = self.loop(self.condition(self.graph), [])
            self.child(body, step, [])
        instance = call("cuGraphInstantiate", self.graph, 0)
        if self.is_broken("it has two instances"):
            call("cuGraphInstantiate", self.graph, 0)
        for _ in range(2):
            call("cuGraphLaunch", instance, self.here.stream)
        self.runtime.wait()


def _arguments(value: torch.Tensor, handle: int) -> Any:
    """Return the arguments of the kernel's launch, which the op makes."""
    launched: list[Any] = []

    class Recorder:
        def launch(self, kernel: str, grid: Any, block: Any, arguments: Any, stream: int = 0) -> None:
            launched.append(arguments)

    set_conditional(Recorder(), value, handle)
    return launched[0]


def _built(broken: str) -> str:
    try:
        _Parts(broken).run()
    except FaserError as error:
        return str(error)
    return "ran"


REFUSED = {
    "nothing": "ran",
    "the condition is another graph's": "cuGraphAddNode failed with CUDA_ERROR_INVALID_VALUE",
    "two nodes share a condition": "cuGraphAddNode failed with CUDA_ERROR_INVALID_VALUE",
    "the node is another context's": "cuGraphAddNode failed with CUDA_ERROR_INVALID_CONTEXT",
    "it does not wait": "cuGraphAddNode failed with CUDA_ERROR_NOT_SUPPORTED",
    "a condition has no node": "cuGraphInstantiate failed with CUDA_ERROR_INVALID_VALUE",
    "its body is another context's": "cuGraphInstantiate failed with CUDA_ERROR_INVALID_VALUE",
    "it is a child": "cuGraphAddChildGraphNode failed with CUDA_ERROR_INVALID_VALUE",
    "it has two instances": "cuGraphInstantiate failed with CUDA_ERROR_INVALID_VALUE",
}
FAILING = (
    "threads race",
    "it does not end",
    "another graph's condition is set",
    "it is set in another context",
    "nothing has set it",
)


@pytest.mark.parametrize("broken", REFUSED)
def test_what_cuda_rules_out_is_refused(gpu: VirtualGpuProcess, broken: str) -> None:
    assert gpu.run(_built, broken) == REFUSED[broken]


@pytest.mark.parametrize("broken", pick(FAILING[:1], FAILING))
def test_what_cuda_leaves_undefined_fails_the_device(broken: str) -> None:
    with VirtualGpuProcess() as gpu:
        assert "CUDA_ERROR_LAUNCH_FAILED" in gpu.run(_built, broken)
