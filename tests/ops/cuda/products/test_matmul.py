"""The matmul kernel, run on the CPU as it is, against its reference: a row's bits depend on that row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.products import matmul as op
from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.products.case import Case, assert_near
from tests.support.effort import examples, pick

TYPES = [("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32")]


@settings(max_examples=examples(60))
@given(
    num_rows=st.sampled_from([1, 2, 9, 16, 17, 65, 130]),
    num_outs=st.sampled_from([1, 8, 16, 40, 131]),
    width=st.sampled_from([8, 64, 72, 264, 520]),
    types=st.sampled_from(TYPES),
    tile_rows=st.sampled_from(sorted(op.TILES)),
    has_addend=st.booleans(),
    has_bias=st.booleans(),
    order=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
def test_the_kernel_is_the_reference(
    num_rows, num_outs, width, types, tile_rows, has_addend, has_bias, order, seed
) -> None:
    case = Case.random(num_rows, num_outs, width, types, has_addend, has_bias, seed)
    assert_near(case.run(emulated("matmul", order=order), tile_rows), case.reference())


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("width", [136, *pick([], [72, 1032])])
def test_a_row_depends_on_no_number_of_rows_and_on_no_place(types: tuple[str, str], width: int) -> None:
    """Every number of rows from 1 to 200, so every place in each tile, against each row alone in the small tile."""
    case = Case.random(200, 24, width, types, has_addend=True, has_bias=True)
    module = emulated("matmul")
    wanted = [part(case, row, row + 1).run(module, 16) for row in range(200)]
    first = 0
    for num_rows in range(1, 201):
        # Windows that move, so that each row is in many places.
        first = (first + 37) % (201 - num_rows)
        tile_rows = [None, 16, 64, 128][num_rows % 4]
        found = part(case, first, first + num_rows).run(module, tile_rows)
        assert torch.equal(found, torch.cat(wanted[first : first + num_rows])), (num_rows, first, tile_rows)


def part(case: Case, first: int, end: int) -> Case:
    addend = None if case.addend is None else case.addend[first:end].contiguous()
    return Case(case.x[first:end].contiguous(), case.weight, addend, case.bias, case.result_type)


def test_a_row_that_is_not_finite_harms_no_other() -> None:
    case = Case.random(70, 24, 136)
    wanted = case.run(emulated("matmul"))
    case.x[5, 3], case.x[66, 0] = float("nan"), float("inf")
    found = case.run(emulated("matmul"))
    others = [row for row in range(70) if row not in (5, 66)]
    assert torch.equal(found[others], wanted[others])
    assert found[5].isnan().all()


def test_the_tile_depends_on_the_size_alone() -> None:
    assert [op.choose_tile_rows(n, 4096) for n in (1, 16, 17, 64, 65, 512)] == [16, 16, 64, 64, 64, 128]
    assert op.choose_tile_rows(65, 28672) == 128


def test_no_rows_are_no_launch() -> None:
    assert Case.random(0, 8, 64).run(None).shape == (0, 8)


def test_wrong_tensors_are_refused() -> None:
    case = Case.random(2, 16, 32, ("fp16", "fp16"), has_addend=True, has_bias=True)
    out = case.reference()
    cases = [
        ((case.x[:, :12], case.weight, out), "x has rows of 12; it must be a multiple of 8"),
        ((case.x.float(), case.weight, out), "x has type fp32; it must be bf16 or fp16"),
        ((case.x, case.weight.bfloat16(), out), "weight has type bf16; it must be fp16"),
        ((case.x, case.weight[:, :16], out), r"weight has shape \[16, 16\]; it must be \[16, 32\]"),
        ((case.x, case.weight, out.bfloat16()), "out has type bf16; it must be fp16 or fp32"),
        ((case.x, case.weight, out[:1]), r"out has shape \[1, 16\]"),
        ((case.x, case.weight, out, out.float()), "addend has type fp32; it must be fp16"),
        ((case.x, case.weight, out, out, case.bias[:8]), r"bias has shape \[8\]"),
        ((case.x, case.weight, out, None, None, 32), r"tile_rows is 32; it must be one of \(16, 64, 128\)"),
    ]
    for arguments, message in cases:
        with pytest.raises(InvalidArgumentError, match=message):
            op.launch(None, *arguments)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("types", TYPES)
def test_on_a_gpu(on_gpu, types: tuple[str, str]) -> None:
    module = on_gpu("matmul")
    for num_outs, width in ((6144, 4096), (4096, 14336), (131, 4104)):
        case = Case.random(200, num_outs, width, types, has_addend=True, has_bias=True)
        wanted = case.run(module, 16, "cuda")
        assert_near(wanted, case.reference())
        for num_rows in (1, 8, 17, 64, 65, 129):
            for tile_rows in op.TILES:
                found = part(case, 200 - num_rows, 200).run(module, tile_rows, "cuda")
                assert torch.equal(found, wanted[200 - num_rows :])
