"""TensorRT engines of the stand-in builder: they run on the virtual GPU, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from faser_trtllm.builder.plan_file import PlanFile
from faser_trtllm.engine.tensorrt.plans import check_requirements
from faser_trtllm.errors import EngineFileError
from tests.support.networks import load_trt
from tests.virtual_gpu.plan_engines import build_plans, generate_texts
from tests.virtual_gpu.process import VirtualGpuProcess

load_trt()  # networks are made with tensorrt_rtx
DRAFT, TARGET = "0+32", "32+100"
PROMPTS = ("The", "def main(", "0, 1, 2, 3,", "hello hello")


@pytest.fixture(scope="module", params=["tensorrt float32", "tensorrt bfloat16", "tensorrt_rtx float32"])
def engine_dir(
    gpu: VirtualGpuProcess, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    backend, dtype = request.param.split()
    return gpu.run(build_plans, tmp_path_factory.mktemp(backend), backend, dtype)


def test_speculation_changes_no_token(gpu: VirtualGpuProcess, engine_dir: Path) -> None:
    """Lanes side by side, rows pruned between the plans of two segments; in bfloat16 the plugins are the kernels."""
    alone = gpu.run(generate_texts, engine_dir, "off", PROMPTS)
    found = gpu.run(generate_texts, engine_dir, "price:mode=draft_ahead,prune=on", PROMPTS)
    assert found.tokens == alone.tokens
    assert found.stats["num_accepted_tokens"] > 0
    assert found.stats["num_pruned_rows"] > 0
    assert found.counters.work[TARGET]["plan of the early exit"] > 0
    assert "plan of layers 1 to 2" in found.counters.work[TARGET]
    assert found.counters.graphs[DRAFT] > 0
    assert set(alone.counters.graphs) == {"whole"}


def test_a_real_tensorrt_refuses_them(engine_dir: Path) -> None:
    with PlanFile.open(engine_dir / "target" / "rank0.engine") as file:
        needs = file.requirements
        real = SimpleNamespace(__name__=needs.backend, __version__="10.13.3.9")
        with pytest.raises(EngineFileError) as caught:
            check_requirements(file.label, needs, real, "9.0")
    assert str(caught.value).endswith(
        f"was built with {needs.backend} 0 (a stand-in for tests), here is {needs.backend} 10.13.3.9; rebuild it with "
        f"faser build --backend {needs.backend}, or install that version"
    )
