"""The grouped_matmul kernel, run on the CPU as it is, against its reference, torch's product, and matmul's bits."""

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
from faser_trtllm.ops.cuda.experts import grouped_matmul as op
from faser_trtllm.ops.cuda.experts.grouped_matmul import Mxfp4Matrices
from faser_trtllm.ops.cuda.products import matmul
from lab.reference.cuda.experts.grouped_matmul import decoded
from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.experts.cases import UNWRITTEN, grouped_case
from tests.ops.cuda.products.case import assert_near
from tests.support.effort import examples, pick

COUNTS = [0, 5, 0, 0, 18, 1, 70, *[0] * 30, 2, 16, 0]  # more groups than a warp has lanes, and empty ones at the edges


def test_the_reference_is_torch_s_product() -> None:
    case = grouped_case([3, 0, 5], 0, 16, 64)
    found = torch.nn.functional.grouped_mm(case.x, case.weights.transpose(1, 2), offs=case.ends)
    assert_near(case.run(None), found)


@settings(max_examples=examples(30))
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 17, 66]), min_size=1, max_size=40),
    num_dummies=st.integers(0, 3),
    num_outs=st.sampled_from([1, 8, 40, 131]),
    width=st.sampled_from([8, 72, 264]),
    is_mxfp4=st.booleans(),
    tile_rows=st.sampled_from([None, *matmul.TILES]),
    order=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
def test_the_kernel_is_the_reference(counts, num_dummies, num_outs, width, is_mxfp4, tile_rows, order, seed) -> None:
    width = {8: 32, 72: 96, 264: 544}[width] if is_mxfp4 else width
    case = grouped_case(counts, num_dummies, num_outs, width, seed, is_mxfp4=is_mxfp4)
    found = case.run(emulated("grouped_matmul", order=order), tile_rows)
    assert_near(found, case.run(None))
    assert (found[sum(counts) :] == UNWRITTEN).all()


@pytest.mark.parametrize("tile_rows", sorted(matmul.TILES))
def test_a_row_has_the_bits_of_a_product_alone(tile_rows: int) -> None:
    """matmul gives the same bits with the matrix of the row's group, whatever the groups and the tile."""
    case, whole, begin = grouped_case(COUNTS, 2, 24, 136), [], 0
    for weight, end in zip(case.weights, case.ends.tolist(), strict=True):
        for row in range(begin, end):
            whole.append(torch.empty((1, 24)).bfloat16())
            matmul.launch(emulated("matmul"), case.x[row : row + 1], weight, whole[-1], tile_rows=16)
        begin = end
    found = case.run(emulated("grouped_matmul"), tile_rows)
    assert torch.equal(found[:-2], torch.cat(whole))


@pytest.mark.parametrize("tile_rows", sorted(matmul.TILES))
def test_mxfp4_has_the_bits_of_its_values_in_bf16(tile_rows: int) -> None:
    """All codes, and scales from the smallest to the largest whose values bf16 holds."""
    case = grouped_case(COUNTS, 2, 24, 288, is_mxfp4=True)
    case.weights.scales.view(-1)[::5] = (
        torch.arange(256).to(torch.uint8).clamp(max=251).repeat(40)[: len(case.weights.scales.view(-1)[::5])]
    )
    case.x[:] = case.x.clamp(-(2.0**-30), 2.0**-30)  # so that no product is infinite
    plain = dataclasses.replace(case, weights=decoded(case.weights))
    module = emulated("grouped_matmul")
    assert torch.equal(case.run(module, tile_rows), plain.run(module, tile_rows))


def test_ends_that_do_not_ascend_stay_within_the_rows() -> None:
    case = grouped_case([3, 2, 5, 1], 2, 16, 64)
    case.ends[:] = torch.tensor([2**31 - 1, -(2**31), 5, -1])
    for tile_rows in matmul.TILES:
        case.run(emulated("grouped_matmul"), tile_rows)


def test_the_tile_holds_an_average_group() -> None:
    sizes = ((4, 32), (512, 32), (513, 32), (2048, 32), (2049, 32), (100_000, 8), (1, 1))
    assert [op.choose_tile_rows(*each) for each in sizes] == [16, 16, 64, 64, 128, 128, 16]


BREAKAGES = {
    "a group begins at the one before": ("ends[group - 1]", "ends[group]"),
    "a tile is the next one": ("num_before + sum > tile", "num_before + sum >= tile"),
    "groups before are not counted": ("num_before += ", "num_before = "),
    "a scale is the block's before": ("? scales[place] :", "? scales[place > 0 ? place - 1 : 0] :"),
    "halves of a byte are swapped": (
        "value(codes) * scale, value(codes >> 4)",
        "value(codes >> 4) * scale, value(codes)",
    ),
    "there is no sign": ("(code & 7) << 22 | (code & 8) << 28", "(code & 7) << 22"),
    "a tile goes past its group": (
        "return {base + owner, first, __shfl_sync(kFullMask, end, owner)};",
        "return {base + owner, first, num_rows};",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("breakage", pick(["a tile is the next one", "groups before are not counted"], BREAKAGES))
def test_broken_kernels_are_found(breakage: str, tmp_path: Path) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(source_dir(), sources)
    kernel = sources / "experts" / "grouped_matmul.cu"
    right, wrong = BREAKAGES[breakage]
    assert kernel.read_text().count(right) == 1
    kernel.write_text(kernel.read_text().replace(right, wrong))
    counts = [*COUNTS, *[0] * 32, 3]
    module = emulated("grouped_matmul", sources=sources)
    cases = [grouped_case(counts, 1, 16, 320, is_mxfp4=is_mxfp4) for is_mxfp4 in (False, True)]
    found, wanted = (torch.cat([case.run(each, 16) for case in cases]) for each in (module, None))
    with pytest.raises(AssertionError, match="not close"):
        assert_near(found, wanted)


def test_wrong_tensors_are_refused() -> None:
    case = grouped_case([2, 1], 0, 16, 64)
    for change, message in (
        ({"x": case.x[:, :12].contiguous()}, "x has rows of 12; it must be a multiple of 8"),
        ({"x": case.x.half()}, "x has type fp16; it must be bf16"),
        ({"weights": case.weights[:1].contiguous()}, "ends has shape"),
        ({"ends": case.ends.long()}, "ends has type int64; it must be int32"),
        ({"weights": Mxfp4Matrices(bytes_of(2, 16, 32), bytes_of(2, 16, 3))}, "weights.scales has shape"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            dataclasses.replace(case, **change).run(emulated("grouped_matmul"))
    odd = Mxfp4Matrices(bytes_of(2, 16, 20), bytes_of(2, 16, 1))
    with pytest.raises(InvalidArgumentError, match="x has rows of 40; it must be a multiple of 32"):
        dataclasses.replace(case, x=case.x[:, :40].contiguous(), weights=odd).run(emulated("grouped_matmul"))
    with pytest.raises(InvalidArgumentError, match=r"tile_rows is 32; it must be one of \(16, 64, 128\)"):
        case.run(emulated("grouped_matmul"), 32)


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.gpu
@pytest.mark.parametrize("is_mxfp4", [False, True])
def test_on_a_gpu(on_gpu, is_mxfp4) -> None:
    module = on_gpu("grouped_matmul")
    for counts, num_outs, width in (
        ([1, 0, 3], 1536, 2048),
        ([40, 7, 0, 300], 5760, 2880),
        ([0] * 127 + [9], 131, 768),
    ):
        case = grouped_case(counts, 3, num_outs, width, is_mxfp4=is_mxfp4)
        found = [case.run(module, tile_rows, "cuda") for tile_rows in matmul.TILES]
        assert_near(found[0], case.run(None))
        assert all(torch.equal(each, found[0]) for each in found)
