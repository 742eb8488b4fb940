"""How many launches a decoder layer and a draft step take, counted by the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from faser_trtllm.config import Quantization
from tests.engine.cuda.harness import build_pair
from tests.virtual_gpu.launches import LONG_CONTEXT, MODELS, MODES, of_draft_step, of_layer
from tests.virtual_gpu.process import VirtualGpuProcess

GEMMS = {"aten.mm.default": 2, "aten.addmm_.default": 2}


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_is_four_products_and_three_kernels(gpu: VirtualGpuProcess, tmp_path: Path, model: str) -> None:
    """Whatever norms and biases of q, k and v a model has."""
    layer, _ = of_layer(gpu, tmp_path, **MODELS[model])
    kernels = ("append_kv_normed_bf16", "gated_silu_bf16", "verify_attention_bf16_h64_m16")
    assert layer == {f"kernel {name}": 1 for name in kernels} | GEMMS


def test_splits_of_long_contexts_are_no_kernel_more(gpu: VirtualGpuProcess, tmp_path: Path) -> None:
    layer, _ = of_layer(gpu, tmp_path, context=LONG_CONTEXT)
    assert not [name for name in layer if "combine" in name]
    assert layer.total() == 7


def test_a_deterministic_target_has_products_of_ours_alone(gpu: VirtualGpuProcess, tmp_path: Path) -> None:
    """It has as many launches as others, with one tile of attention, which splits long contexts."""
    layer, rest = of_layer(gpu, tmp_path, context=LONG_CONTEXT, deterministic=True)
    kernels = {
        "append_kv_normed_bf16": 1,
        "gated_silu_bf16": 1,
        "verify_attention_bf16_h64_m64": 1,
        "matmul_bf16_m16": 4,
    }
    assert layer == {f"kernel {name}": count for name, count in kernels.items()}
    assert rest["kernel matmul_bf16_fp32_m16"] == 1
    assert not any("mm." in label for label in rest)


def test_fp8_adds_the_scales_of_what_was_attended_and_the_residuals(gpu: VirtualGpuProcess, tmp_path: Path) -> None:
    layer, _ = of_layer(gpu, tmp_path, Quantization.FP8)
    own = {"kernel quantize_rows": 1, "kernel add_quantize_rows": 2, "kernel gated_silu_e4m3": 1}
    assert own.items() <= layer.items()
    assert layer["aten._scaled_mm.default"] == 4
    assert layer.total() == 10


@pytest.mark.parametrize("mode", MODES)
def test_a_draft_step_is_three_kernels_and_a_pass(gpu: VirtualGpuProcess, tmp_path: Path, mode: str) -> None:
    draw, inputs = of_draft_step(gpu, build_pair(tmp_path), mode)
    assert draw == {"kernel sample_rows": 1, "kernel sample_advance": 1}
    assert inputs == {"kernel take_step": 1}
