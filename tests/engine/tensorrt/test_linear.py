"""Engines with linear KV caches have as many cache rows as they were built for, whatever is served with them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.dry_gpu import DryGpu
from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.builder.network.segment import build_segment, create_network
from faser_trtllm.builder.plan_file import PlanFile
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.engine.opening import OpenedEngines, OpenRequest
from faser_trtllm.engine.tensorrt.open import open_plans
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.weights import CheckpointWeights
from lab.interpreted.interpreter import Interpreter
from tests.engine.tensorrt.stand_in import StandInTrt
from tests.support.checkpoints import make_checkpoint
from tests.support.eagle3 import make_head
from tests.support.networks import load_trt, new_builder

trt = load_trt()
NUM_ROWS, LONGEST = 4, 96


class Gpu(DryGpu):
    compute_capability = "8.9"

    def __init__(self, free_bytes: int) -> None:
        super().__init__()
        self._free_bytes = free_bytes

    def free_bytes(self) -> int:
        return self._free_bytes


class Served:
    """Built engines with an EAGLE-3 head, and a runtime that knows their plans."""

    def __init__(self, directory: Path) -> None:
        target = make_checkpoint(directory / "target", num_layers=2, head_dim=64)
        head = make_head(directory / "head", target, layers=(0, 1, 2))
        sizes = {"max_batch_size": NUM_ROWS, "max_num_tokens": 32, "max_seq_len": LONGEST}
        options = BuildOptions(target, head, directory / "engines", backend="tensorrt_rtx", **sizes)
        self.engines: EngineDir = build_engines(options)
        model = load_model_config(target), CheckpointWeights(target)
        self._plans: dict[bytes, Any] = {}
        with PlanFile.open(self.engines.target_path) as file:
            for plan in file.plans:
                network = create_network(trt, new_builder(trt))
                made = build_segment(trt, network, *model, plan.info.first, plan.info.last, file.network)
                view = file.view(plan)
                self._plans[bytes(view)] = plan.info, Interpreter(trt, made.network, made.weights)
                view.release()

    def num_rows(self, free_bytes: int = 1 << 40, **fields: Any) -> tuple[int, int]:
        """Open an executor and return the cache rows of the target and of the head."""
        found = []

        def opener(request: OpenRequest, stack: ExitStack) -> OpenedEngines:
            runtime = StandInTrt(trt, self._plans.get, version=str(trt.__version__))
            opened = open_plans(request, runtime, Gpu(free_bytes), stack)
            assert opened.draft is not None
            found.append((opened.target.spec.num_blocks, opened.draft.spec.num_blocks))
            return opened

        with open_executor(self.engines.path, ExecutorConfig(speculation="fixed:2", **fields), opener=opener):
            return found[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("linear"))


@pytest.mark.parametrize("fields", [{}, {"max_batch_size": 2}, {"kv_cache_config": {"max_tokens": 2 * LONGEST}}])
def test_target_and_head_have_the_rows_that_were_built(
    served: Served, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert served.num_rows(**fields) == (NUM_ROWS, NUM_ROWS)


def test_too_little_memory_for_them_is_named(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    row_bytes = LONGEST * served.engines.kv_bytes_per_token()
    needed = next(n for n in range(1, 1000) if _opens(served, n * row_bytes))
    with pytest.raises(ConfigError, match=r"the engines need .* GiB of GPU memory"):
        served.num_rows(free_bytes=(needed - 1) * row_bytes)


def _opens(served: Served, free_bytes: int) -> bool:
    try:
        return served.num_rows(free_bytes=free_bytes) == (NUM_ROWS, NUM_ROWS)
    except ConfigError:
        return False
