"""TensorRT engines of the stand-in builder: they run on the virtual GPU, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from faser_trtllm.builder.plan_file import PlanFile
from faser_trtllm.engine.tensorrt.plans import check_requirements
from faser_trtllm.errors import EngineFileError
from tests.support.effort import ONLY_ALL, pick
from tests.support.networks import load_trt
from tests.virtual_gpu.plan_engines import build_plans, generate_texts, prompt_log_probs
from tests.virtual_gpu.process import VirtualGpuProcess

pytestmark = pytest.mark.slow

load_trt()  # networks are made with tensorrt_rtx
DRAFT, TARGET = "0+32", "32+100"
PROMPTS = ("The", "def main(", "0, 1, 2, 3,", "hello hello")
FIXED, PRICE = "fixed:4", "price:mode=draft_ahead,prune=on"
SUFFIX, BOTH = ("suffix",), ("suffix", "model")
EVERY_PAIR = [(SUFFIX, PRICE), (BOTH, FIXED), (SUFFIX, FIXED), (BOTH, PRICE)]
TEXT_DRAFTS = [  # backend, its type, and drafters with policies
    ("tensorrt", "bfloat16", pick([(BOTH, FIXED)], EVERY_PAIR)),
    *pick([], [("tensorrt_rtx", "float32", EVERY_PAIR)]),
]


ENGINES = (*pick([], ["tensorrt float32", "tensorrt bfloat16"]), "tensorrt bfloat16 FP8", "tensorrt_rtx float32")


@pytest.fixture(scope="module", params=ENGINES)
def engine_dir(
    gpu: VirtualGpuProcess, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    backend, dtype, *quantization = request.param.split()
    changes = {"quantization": quantization[0], "draft_quantization": quantization[0]} if quantization else {}
    return gpu.run(build_plans, tmp_path_factory.mktemp(backend), backend, dtype, **changes)


def test_speculation_changes_no_token(gpu: VirtualGpuProcess, engine_dir: Path) -> None:
    """Lanes side by side, rows pruned between the plans of two segments; in bfloat16 the plugins are the kernels."""
    alone = gpu.run(generate_texts, engine_dir, "off", PROMPTS)
    found = gpu.run(generate_texts, engine_dir, PRICE, PROMPTS)
    assert found.tokens == alone.tokens
    assert found.stats["num_accepted_tokens"] > 0
    assert found.stats["num_pruned_rows"] > 0
    assert found.counters.work[TARGET]["plan of the early exit"] > 0
    assert "plan of layers 1 to 2" in found.counters.work[TARGET]
    assert found.counters.graphs[DRAFT] > 0
    assert set(alone.counters.graphs) == {"whole"}


@pytest.mark.parametrize(("backend", "dtype", "pairs"), TEXT_DRAFTS)
def test_drafts_of_the_text_change_no_token(
    gpu: VirtualGpuProcess, tmp_path: Path, backend: str, dtype: str, pairs: list[tuple[tuple[str, ...], str]]
) -> None:
    """Alone, and before those of a draft model of one layer."""
    path = gpu.run(build_plans, tmp_path, backend, dtype, drafts_itself=False)
    alone = gpu.run(generate_texts, path, "off", PROMPTS)
    for drafters, policy in pairs:
        found = gpu.run(generate_texts, path, policy, PROMPTS, drafters)
        assert found.tokens == alone.tokens
        for name in drafters if policy == FIXED else ("suffix",):
            assert found.stats[f"num_passed_drafts_{name}"] > 0


def test_log_probs_of_prompts_in_passes_of_other_sizes(gpu: VirtualGpuProcess, engine_dir: Path) -> None:
    """The passes have four rows of logits without drafts and twenty with them."""
    prompts = [list(range(first, first + 14)) for first in (5, 10)]
    alone = gpu.run(prompt_log_probs, engine_dir, "off", prompts)
    found = gpu.run(prompt_log_probs, engine_dir, FIXED, prompts, num_top_log_probs=2)
    assert [len(log_probs) for log_probs in found] == [13, 13]
    for one, other in zip(found, alone, strict=True):
        assert one == pytest.approx(other, abs=1e-3)


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


@ONLY_ALL
def test_long_contexts_are_split_by_two_plugins(gpu: VirtualGpuProcess, tmp_path: Path) -> None:
    """A context of two chunks and a short one, in plans whose attention is followed by the plugin that combines."""
    sizes = {"max_num_tokens": 1024, "max_seq_len": 1024, "max_position_embeddings": 1024}
    path = gpu.run(build_plans, tmp_path, dtype="bfloat16", **sizes)
    with PlanFile.open(path / "target" / "rank0.engine") as file:
        assert "faser::verify_attention_combine" in file.segments[0].info.plugins
    prompts = ("a b c d " * 140, "The")
    alone, found = (
        gpu.run(generate_texts, path, policy, prompts, max_tokens=8) for policy in ("off", "price:prune=on")
    )
    assert found.tokens == alone.tokens
    assert found.stats["num_accepted_tokens"] > 0
