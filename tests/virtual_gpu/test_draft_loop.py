"""Drafting on the virtual GPU, ended by random stop rules: by a graph that ends itself, and by the host where the
driver refuses such graphs. Both run the same steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.engine.gpu.device import CudaGpu
from tests.engine.cuda.drafting import Drafting
from tests.engine.cuda.harness import MAX_BATCH_SIZE, build_pair, open_engine
from tests.support.effort import pick
from tests.virtual_gpu.device.counters import Counters
from tests.virtual_gpu.device.library import driver
from tests.virtual_gpu.process import VirtualGpuProcess

pytestmark = pytest.mark.slow

MAX_DRAFT_LEN, HEAD_DIM = 4, 64
NUM_CALLS = pick(6, 60)
DRAFTS, STOP = "engine/gpu/sampler/draft_state:read", "engine/gpu/sampler/draft_state:num_going"
REFUSALS = [
    {"LIBCUDA_FAILS": "cuGraphInstantiateWithFlags"},
    *pick(
        [],
        [
            {"LIBCUDA_FAILS": "cuGraphConditionalHandleCreate"},
            {"LIBCUDA_FAILS": "cuGraphAddNode"},
            {"LIBCUDA_FAILS": "cuGraphAddChildGraphNode"},
            {"LIBCUDA_LACKS": "cuGraphConditionalHandleCreate"},
        ],
    ),
]
# Of a call: the longest draft that is wanted, what was drafted, the kernels that ran, and reads.
Call = tuple[int, Any, dict[str, int], dict[str, tuple[int, int]]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build_pair(tmp_path_factory.mktemp("pair"), vocab_size=320)


def _random_stop(rng: np.random.Generator) -> DraftStop | None:
    if rng.random() < 0.2:
        return None
    shape = (NUM_MODES, MAX_DRAFT_LEN)
    curves = [rng.random(shape, np.float32) * width + at for width, at in ((1, 0), (4, -2), (0.5, 0.4), (0.2, 0))]
    step_price = np.full(MAX_BATCH_SIZE + 1, rng.choice([0.0, 0.5, 1.5]), np.float32)
    return DraftStop(*curves, rng.random(MAX_DRAFT_LEN, np.float32) * np.float32(0.5), step_price)


def _calls(engines: EngineDir) -> list[Call]:
    """Calls with random lengths and rules, of 1 to 5 requests: greedy, seeded and one unseeded."""
    driver().seed(0)
    torch.manual_seed(0)
    calls: list[Call] = []
    rng = np.random.default_rng(5)
    with CudaGpu() as gpu:
        runtime, side = gpu.make_runtime(), gpu.pair.draft
        with open_engine(
            engines.draft_path,
            gpu.make_ops(runtime, HEAD_DIM),
            torch.bfloat16,
            runtime,
            partition=side,
            max_draft_len=MAX_DRAFT_LEN,
            max_graph_rows=MAX_BATCH_SIZE,
        ) as engine:
            engine.capture_graphs([side])
            for _ in range(NUM_CALLS):
                num_requests = int(rng.integers(1, MAX_BATCH_SIZE + 1))
                drafting = Drafting(engine, num_requests, sampled=(2,), top_k=20)
                wanted, stop = rng.integers(0, MAX_DRAFT_LEN + 1, num_requests).tolist(), _random_stop(rng)
                before = Counters.now()
                drafted = drafting.run(wanted, stop=stop)
                found = Counters.now().since(before)
                calls.append((max(wanted), drafted, found.kernels("0+32"), found.reads()))
    return calls


@pytest.fixture(scope="module")
def by_device(gpu: VirtualGpuProcess, engines: EngineDir) -> list[Call]:
    return gpu.run(_calls, engines)


def test_the_host_reads_once_a_call_and_steps_that_nobody_wants_run_nothing(by_device: list[Call]) -> None:
    num_short = 0
    for wanted, (counts, _), kernels, reads in by_device:
        most = max(counts)
        assert kernels.get("sample_rows", 0) == kernels.get("set_conditional", 0) == most
        assert kernels.get("take_step", 0) == max(0, most - 1)
        assert set(reads) == ({DRAFTS} if wanted else set())
        num_short += most < wanted
    assert num_short > 1, "rules end some calls early"


@pytest.mark.parametrize("environment", REFUSALS, ids=lambda refused: "-".join(*refused.items()))
def test_a_driver_that_refuses_loops_drafts_the_same(
    engines: EngineDir, by_device: list[Call], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, by the same kernels, launched one step after the other."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with VirtualGpuProcess() as gpu:
        by_host = gpu.run(_calls, engines)
    for (_, drafted, kernels, reads), (_, wanted, with_loop, _) in zip(by_host, by_device, strict=True):
        assert drafted == wanted
        assert kernels == {name: count for name, count in with_loop.items() if name != "set_conditional"}
        num_reads, num_bytes = reads.get(STOP, (0, 0))
        assert num_bytes == 4 * num_reads
    assert sum(STOP in reads for *_, reads in by_host) > 1
