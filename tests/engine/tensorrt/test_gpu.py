"""The TensorRT engine on a GPU: `pytest -m "gpu and tensorrt"`. Not run yet: no GPU was at hand.

Builds a tiny model with whichever TensorRT is installed, and compares the engine with the torch reference, with graphs
and without, alone and under an executor. What it answers first: does TensorRT for RTX take this GPU, is the rotary
embedding half-split, are masked caches exact, and may a cache output have its input's address.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.engine.gpu.device import CudaGpu
from faser_trtllm.engine.gpu.engine import GpuEngine
from faser_trtllm.engine.opening import OpenRequest
from faser_trtllm.engine.tensorrt.open import open_plans
from faser_trtllm.errors import FaserError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights
from faser_trtllm.serving.text.offline import generate_all
from tests.support.checkpoints import make_pair
from tests.support.scenario import RAGGED, Scenario

pytestmark = [pytest.mark.gpu, pytest.mark.tensorrt]
# Of the logits' standard deviation: bf16 rounds activations and KV; tests/builder/test_cpu_parity.py allows as much.
TOLERANCE = 0.1
MAX_SEQ_LEN = 96


@pytest.fixture(scope="module")
def gpu() -> Iterator[CudaGpu]:
    try:
        opened = CudaGpu()
    except FaserError as error:
        pytest.skip(f"needs a GPU: {error}")
    with opened:
        yield opened


@pytest.fixture(scope="module", params=["tensorrt_rtx", "tensorrt"])
def built(request: pytest.FixtureRequest, gpu: CudaGpu, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module, the checkpoints and the engine directory."""
    trt = pytest.importorskip(request.param, reason=f"needs {request.param}")
    directory = tmp_path_factory.mktemp(request.param)
    target, draft = make_pair(directory / "checkpoints", num_layers=4, hidden_size=256, num_heads=4)
    engines = build_engines(
        BuildOptions(
            target,
            draft,
            directory / "engines",
            backend=request.param,
            max_batch_size=4,
            max_num_tokens=64,
            max_seq_len=MAX_SEQ_LEN,
            exit_layers=(1, 3),
        )
    )
    return trt, target, engines


@pytest.fixture
def engine(built: Any, gpu: CudaGpu) -> Iterator[GpuEngine]:
    trt, _, engines = built
    blocks_per_seq = -(-MAX_SEQ_LEN // engines.build_config.tokens_per_block)
    limits = replace(engines.build_config, max_draft_len=15)  # logits of all 64 rows
    with ExitStack() as stack:
        request = OpenRequest(engines, limits, 4 * blocks_per_seq, drafting=False)
        opened = open_plans(request, trt, gpu, stack)
        assert isinstance(opened.target, GpuEngine)
        yield opened.target


@pytest.fixture
def reference(built: Any) -> Iterator[ReferenceModel]:
    _, target, _ = built
    with CheckpointWeights(target) as weights:
        yield ReferenceModel(load_model_config(target), weights)


def make_scenario(engine: GpuEngine, reference: ReferenceModel, seed: int) -> Scenario:
    scenario = Scenario(engine, reference, seed)
    table = scenario.block_table.reshape(engine.spec.max_batch_size, -1)
    scenario.block_table = table
    scenario._builder = type(scenario._builder)(table)
    return scenario


def test_ragged_passes_give_the_references_logits(engine: GpuEngine, reference: ReferenceModel) -> None:
    """Passes are replays of graphs that were captured at the start."""
    for seed in range(3):
        scenario = make_scenario(engine, reference, seed)
        for step in RAGGED:
            found, expected = scenario.step(step)
            logits = np.asarray(found[:])
            assert np.isfinite(logits).all()
            assert np.abs(logits - expected).max() < TOLERANCE * expected.std()
    assert len(engine.graphs)


def test_a_graph_gives_what_the_first_run_gave(engine: GpuEngine, reference: ReferenceModel) -> None:
    results = []
    for _ in range(3):
        scenario = make_scenario(engine, reference, 7)
        results.append([np.array(scenario.step(step)[0][:]) for step in RAGGED])
    for again in results[1:]:
        for one, other in zip(results[0], again, strict=True):
            np.testing.assert_array_equal(one, other)


def test_speculation_changes_no_token(built: Any) -> None:
    """Greedy, unless two logits are as near as bf16 rounds: batch sizes differ, and so may sums."""
    _, _, engines = built
    fields = {"max_tokens": 24, "temperature": 0.0, "end_ids": ()}
    prompts = ("The", "def main(", "0, 1, 2, 3,")
    texts = []
    for speculation in ("off", "fixed:1", "fixed:4"):
        with open_executor(engines.path, ExecutorConfig(speculation=speculation)) as executor:
            texts.append([each.token_ids for each in generate_all(executor, engines.path, prompts, fields)])
    same = [sum(a == b for a, b in zip(texts[0], other, strict=True)) for other in texts[1:]]
    assert min(same) >= 2, "all but perhaps one of three prompts must agree"
