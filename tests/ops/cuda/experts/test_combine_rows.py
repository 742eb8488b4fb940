"""The combine_rows kernel, run on the CPU as it is, against the reference; and on a GPU where there is one."""

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
from tests.ops.cuda.experts.cases import CombineCase, combine_case
from tests.support.effort import examples, pick


def test_the_reference_is_a_sum_over_the_experts_and_the_shared_one() -> None:
    case = combine_case(4, 4, 3, 16, has_shared=True, has_bias=True)
    wanted = case.hidden.double()
    for row in range(4):
        for j in range(3):
            output = case.outputs[case.routes.places[row, j]].double() + case.bias[case.routes.experts[row, j]].double()
            wanted[row] += case.routes.weights[row, j].double() * output
        wanted[row] += torch.sigmoid(case.routes.logits[row, -1].double()) * case.shared[row].double()
    assert torch.equal(case.run(None), wanted.bfloat16())


@settings(max_examples=examples(30))
@given(
    num_rows=st.integers(1, 5),
    unused=st.integers(0, 2),
    top_k=st.sampled_from([1, 2, 8]),
    width=st.sampled_from([8, 72, 1024, 1032]),
    has_shared=st.booleans(),
    has_bias=st.booleans(),
    order=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
def test_the_kernel_is_the_reference(num_rows, unused, top_k, width, has_shared, has_bias, order, seed) -> None:
    """Dummies keep their rows."""
    options = {"has_shared": has_shared, "has_bias": has_bias, "seed": seed}
    case = combine_case(num_rows, max(num_rows - unused, 0), top_k, width, **options)
    found = case.run(emulated("combine_rows", order=order))
    assert_near(found, case.run(None))
    assert torch.equal(found[case.num_used :], case.hidden[case.num_used :])


def test_experts_are_added_in_ascending_order() -> None:
    """1, 2^-24 and 2^-24 in fp32: the sum depends on the order; and it is rounded once."""
    case = combine_case(1, 1, 3, 8)
    case.routes.weights[:] = torch.tensor([1.0, 2.0**-24, 2.0**-24])
    case.outputs[:] = 1
    case.hidden[:] = -1
    assert (case.run(emulated("combine_rows")) == 0).all()
    case.routes.weights[:] = case.routes.weights.flip(1).clone()
    assert (case.run(emulated("combine_rows")) == 2.0**-23).all()


def test_a_row_depends_on_no_other_row() -> None:
    case = combine_case(6, 6, 2, 72, has_shared=True, has_bias=True)
    whole = case.run(emulated("combine_rows"))
    assert torch.equal(alone(case, 3).run(emulated("combine_rows", order=1)), whole[3:4])


def alone(case: CombineCase, row: int) -> CombineCase:
    """One row of a case, whose pairs are the first ones."""
    routes, top_k = case.routes, case.routes.places.shape[1]
    pairs = routes.places[row].long()
    own = dataclasses.replace(
        routes.first(1),
        logits=routes.logits[row : row + 1].clone(),
        weights=routes.weights[row : row + 1].clone(),
        places=torch.arange(top_k, dtype=torch.int32)[None],
        experts=routes.experts[row : row + 1].clone(),
    )
    shared = None if case.shared is None else case.shared[row : row + 1].clone()
    return CombineCase(own, case.outputs[pairs].clone(), shared, case.hidden[row : row + 1].clone(), 1, case.bias)


def test_places_that_do_not_exist_are_left_out() -> None:
    case = combine_case(2, 2, 2, 16)
    case.routes.places[:] = torch.tensor([[-1, 4], [2**30, -(2**30)]])
    assert torch.equal(case.run(emulated("combine_rows")), case.hidden)


BREAKAGES = {
    "rows are not weighted": ("sums[i] += weight * (", "sums[i] += ("),
    "there is no bias": ("(values[i] + biases[i])", "values[i]"),
    "a bias is another expert's": ("clamp(experts[row * top_k + j]", "clamp(experts[row * top_k]"),
    "the gate is an expert's": ("row * num_gates + num_gates - 1", "row * num_gates"),
    "the residual is lost": ("before[i] + sums[i]", "sums[i]"),
    "one expert is left out": ("for (int32_t j = 0;", "for (int32_t j = 1;"),
}


@pytest.mark.slow
@pytest.mark.parametrize("breakage", pick(["one expert is left out"], BREAKAGES))
def test_broken_kernels_are_found(breakage: str, tmp_path: Path) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(source_dir(), sources)
    kernel = sources / "experts" / "combine_rows.cu"
    right, wrong = BREAKAGES[breakage]
    assert kernel.read_text().count(right) == 1
    kernel.write_text(kernel.read_text().replace(right, wrong))
    case = combine_case(3, 3, 2, 16, has_shared=True, has_bias=True)
    with pytest.raises(AssertionError, match="not close"):
        assert_near(case.run(emulated("combine_rows", sources=sources)), case.run(None))


def test_wrong_tensors_are_refused() -> None:
    case = combine_case(2, 2, 2, 16)
    for change, message in (
        ({"hidden": case.hidden[:, :12].contiguous()}, "hidden has rows of 12; it must be a multiple of 8"),
        ({"outputs": case.outputs[:3].contiguous()}, "outputs has shape"),
        ({"shared": case.hidden.float()}, "shared has type fp32; it must be bf16"),
        ({"bias": case.hidden}, "bias has shape"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            dataclasses.replace(case, **change).run(emulated("combine_rows"))


@pytest.mark.gpu
def test_on_a_gpu(on_gpu) -> None:
    module = on_gpu("combine_rows")
    for shape in ((1, 1, 8, 2048), (600, 590, 8, 4096), (3, 3, 2, 1032)):
        case = combine_case(*shape, has_shared=True, has_bias=True)
        assert_near(case.run(module, "cuda"), case.run(None))


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-7, atol=1e-5)
