"""The clamped_swiglu kernel, run on the CPU as it is, against the reference; and on a GPU where there is one."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.compiler import source_dir
from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.experts.cases import UNWRITTEN, SwigluCase, swiglu_case
from tests.support.effort import examples, pick


def test_the_reference_is_transformers_activation() -> None:
    """transformers has gate and up in turn, and the biases in the product before."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=16, num_local_experts=3))
    case = swiglu_case([2, 0, 3], 0, 16)
    biased = case.gate_up.float() + torch.repeat_interleave(case.bias.float(), torch.tensor([2, 0, 3]), 0)
    gate, up = biased.chunk(2, -1)
    wanted = experts._apply_gate(torch.stack((gate, up), -1).flatten(-2))
    assert (gate > 7).any()
    assert (up.abs() > 7).any()
    assert torch.equal(case.run(None), wanted.bfloat16())


@settings(max_examples=examples(30))
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    num_dummies=st.integers(0, 3),
    inner=st.sampled_from([8, 72, 2048, 2056]),
    spread=st.sampled_from([1.0, 4.0, 300.0]),
    order=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
def test_the_kernel_is_the_reference(counts, num_dummies, inner, spread, order, seed) -> None:
    """Experts without pairs, first, last and between, and dummies, whose rows are not written."""
    case = swiglu_case(counts, num_dummies, inner, spread=spread, seed=seed)
    found = case.run(emulated("clamped_swiglu", order=order))
    assert_near(found, case.run(None))
    assert (found[sum(counts) :] == UNWRITTEN).all()


def test_a_pair_depends_on_no_other_pair() -> None:
    case = swiglu_case([3, 0, 5, 1], 2, 72)
    whole = case.run(emulated("clamped_swiglu"))
    alone = SwigluCase(case.gate_up[5:6].clone(), case.bias, torch.tensor([0, 0, 1, 1], dtype=torch.int32))
    assert torch.equal(alone.run(emulated("clamped_swiglu", order=1)), whole[5:6])


def test_ends_that_do_not_ascend_are_harmless() -> None:
    case = swiglu_case([3, 2, 5, 1], 2, 16)
    case.ends[:] = torch.tensor([2**31 - 1, -(2**31), 5, -1])
    case.run(emulated("clamped_swiglu"))


BREAKAGES = {
    "a bias is the next expert's": ("ends[middle] > pair", "ends[middle] >= pair"),
    "gates are not clamped": ("fminf(gate[i] + gate_bias[i], faser::kGateLimit)", "(gate[i] + gate_bias[i])"),
    "ups have no lower limit": ("fmaxf(up[i] + up_bias[i], -faser::kGateLimit)", "(up[i] + up_bias[i])"),
    "up is not raised by one": ("(y + 1.0f)", "y"),
    "the slope is silu's": ("expf(-faser::kGateAlpha * x)", "expf(-x)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("breakage", pick(["a bias is the next expert's", "ups have no lower limit"], BREAKAGES))
def test_broken_kernels_are_found(breakage: str, tmp_path: Path) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(source_dir(), sources)
    kernel = sources / "experts" / "clamped_swiglu.cu"
    right, wrong = BREAKAGES[breakage]
    assert kernel.read_text().count(right) == 1
    kernel.write_text(kernel.read_text().replace(right, wrong))
    case = swiglu_case([3, 2, 4], 0, 16)
    with pytest.raises(AssertionError, match="not close"):
        assert_near(case.run(emulated("clamped_swiglu", sources=sources)), case.run(None))


def test_wrong_tensors_are_refused() -> None:
    case = swiglu_case([2, 1], 0, 16)
    for change, message in (
        ({"gate_up": case.gate_up[:, :24].contiguous()}, "out has rows of 12; it must be a multiple of 8"),
        ({"bias": case.bias[:1].contiguous()}, "bias has shape"),
        ({"ends": case.ends.long()}, "ends has type int64; it must be int32"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            dataclasses.replace(case, **change).run(emulated("clamped_swiglu"))


@pytest.mark.gpu
def test_on_a_gpu(on_gpu) -> None:
    module = on_gpu("clamped_swiglu")
    for counts, num_dummies, inner in (([1], 0, 2880), ([40] * 32, 5, 2880), ([0, 3, 0], 1, 2056)):
        case = swiglu_case(counts, num_dummies, inner)
        assert_near(case.run(module, "cuda"), case.run(None))


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-7, atol=1e-5)
