"""The route_rows kernels, run on the CPU as they are, against the reference; and on a GPU where there is one."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.compiler import source_dir
from faser_trtllm.ops.cuda.experts import route_rows as op
from faser_trtllm.ops.cuda.experts.route_rows import Choice
from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.experts.cases import UNWRITTEN, RouteCase, assert_same_routes, random_case, whole_case
from tests.support.effort import examples, pick


def test_the_reference_sorts_pairs_by_expert_and_then_by_row() -> None:
    """Results are worked out by hand: two rows of four experts, the first with two equal logits, and a dummy."""
    x = torch.eye(3, 8).bfloat16()
    router = torch.zeros(4, 8)
    router[:, 0], router[:, 1] = torch.tensor([1.0, 3.0, 2.0, 3.0]), torch.tensor([0.0, -1.0, 5.0, 4.0])
    found = RouteCase(x, router.bfloat16(), 2, Choice(4, 3, over_all=True)).run(None)
    assert found.experts.tolist()[:2] == [[1, 2, 3], [0, 2, 3]]
    assert found.rows.tolist() == [1, 0, 0, 1, 0, 1, 0, 0, 0]
    assert found.ends.tolist() == [1, 2, 4, 6]
    assert found.places.tolist() == [[1, 2, 4], [0, 3, 5], [UNWRITTEN] * 3]
    assert int(found.num_distinct) == 4
    scores = torch.softmax(torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, -1.0, 5.0, 4.0]]), -1)
    torch.testing.assert_close(found.weights[:2], scores.gather(1, found.experts[:2].long()))


def test_of_equal_logits_the_lowest_indices_are_taken() -> None:
    """Zeros of both signs are equal."""
    router = torch.zeros(40, 8)
    router[:, 0] = torch.tensor([-0.0, 0.0] * 20)
    router[33, 0] = 1.0
    case = RouteCase(torch.eye(1, 8).bfloat16(), router.bfloat16(), 1, Choice(40, 4, over_all=False))
    for launcher in (None, emulated("route_rows")):
        assert case.run(launcher).experts.tolist() == [[0, 1, 2, 33]]


@settings(max_examples=examples(40))
@given(
    num_rows=st.integers(1, 20),
    unused=st.integers(0, 3),
    experts=st.sampled_from([(1, 1), (4, 2), (8, 8), (33, 3), (64, 6), (128, 8), (512, 10)]),
    width=st.sampled_from([8, 64, 264]),
    over_all=st.booleans(),
    others=st.integers(0, 1),
    has_bias=st.booleans(),
    order=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
def test_the_kernels_are_the_reference(
    num_rows, unused, experts, width, over_all, others, has_bias, order, seed
) -> None:
    used, options = max(num_rows - unused, 0), {"over_all": over_all, "others": others, "has_bias": has_bias}
    case = whole_case(num_rows, used, *experts, width, seed=seed, **options)
    assert_same_routes(case.run(emulated("route_rows", order=order)), case.run(None))


def test_more_rows_than_a_block_has_threads() -> None:
    case = whole_case(600, 590, 8, 2)
    assert_same_routes(case.run(emulated("route_rows")), case.run(None))


def test_all_rows_take_the_same_experts() -> None:
    case = whole_case(64, 64, 16, 2)
    case.x[:] = case.x[:1].clone()
    found = case.run(emulated("route_rows"))
    assert_same_routes(found, case.run(None))
    assert int(found.num_distinct) == 2


@pytest.mark.parametrize("num_used", [0, -5, 1000])
def test_dummies_have_no_pairs(num_used: int) -> None:
    """Counts that are none of a batch included."""
    case = whole_case(9, num_used, 8, 2)
    found = case.run(emulated("route_rows"))
    assert_same_routes(found, case.run(None))
    assert int(found.ends[-1]) == 2 * min(max(num_used, 0), 9)


def test_distinct_experts_are_added_up_over_layers() -> None:
    case = whole_case(5, 5, 32, 4)
    first = case.run(emulated("route_rows"))
    assert int(first.num_distinct) == len(set(first.experts.reshape(-1).tolist()))
    second = case.run(emulated("route_rows"), before=int(first.num_distinct))
    assert int(second.num_distinct) == 2 * int(first.num_distinct)


@pytest.mark.parametrize("order", [0, 1, 5])
def test_a_row_depends_on_no_other_row_and_no_order_of_threads(order: int) -> None:
    """Bit for bit, of numbers whose sums are rounded: alone, in another place, among others, among dummies."""
    case = random_case(21, 21, 48, 5, 520, others=1)
    whole = case.run(emulated("route_rows"))
    for rows in ([7], [20, 7], [*range(7, 0, -1)], [7, 7, 3]):
        part = dataclasses.replace(case, x=case.x[rows].contiguous(), num_used=len(rows))
        for each in (part, dataclasses.replace(part, x=torch.cat((part.x, case.x[:4])))):
            found = each.run(emulated("route_rows", order=order))
            for name in ("logits", "experts", "weights"):
                assert torch.equal(getattr(found, name)[: len(rows)], getattr(whole, name)[rows]), name


def test_logits_are_sums_in_fp32() -> None:
    case = random_case(9, 9, 24, 3, 2048)
    wanted = case.x.double() @ case.router.double().t()
    torch.testing.assert_close(case.run(emulated("route_rows")).logits.double(), wanted, rtol=0, atol=2e-5)


def test_weights_are_torch_s() -> None:
    """A softmax and then the largest, divided by their sum, as transformers has it."""
    case = random_case(9, 9, 24, 3, 64)
    found = case.run(emulated("route_rows"))
    scores, experts = torch.softmax(found.logits, -1).topk(3)
    ascending = experts.argsort(-1)
    assert torch.equal(found.experts.long(), experts.gather(1, ascending))
    parts = (scores / scores.sum(-1, keepdim=True)).gather(1, ascending)
    torch.testing.assert_close(found.weights, parts, rtol=1e-5, atol=1e-7)


def test_nan_logits_are_harmless() -> None:
    case = whole_case(5, 5, 40, 3)
    case.x[2, 0] = np.nan
    found, clean = case.run(emulated("route_rows")), whole_case(5, 5, 40, 3).run(None)
    assert ((found.experts >= 0) & (found.experts < 40)).all()
    others = [0, 1, 3, 4]
    assert torch.equal(found.experts[others], clean.experts[others])
    assert sorted(found.places.reshape(-1).tolist()) == list(range(15))


BREAKAGES = {
    "of equal logits the highest index is taken": ("(0xffffffffu - static_cast<uint32_t>(expert))", "expert"),
    "an expert is taken twice": ("&& !(taken >> i & 1)", ""),
    "dummies have pairs": ("return clamp(*num_used, 0, num_rows);", "return num_rows;"),
    "weights are over all": ("const bool counts_in = over_all ?", "const bool counts_in = true ?"),
    "a group begins at its end": ("e < expert; e += kThreads)", "e <= expert; e += kThreads)"),
    "counts are not cleared": ("counts[e] = 0;", ";"),
    "there is no bias": ("warp_sum(sums[r]) + (bias == nullptr", "warp_sum(sums[r]) + (true"),
}


@pytest.mark.slow
@pytest.mark.parametrize("breakage", pick(["an expert is taken twice", "dummies have pairs"], BREAKAGES))
def test_broken_kernels_are_found(breakage: str, tmp_path: Path) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(source_dir(), sources)
    kernel = sources / "experts" / "route_rows.cu"
    right, wrong = BREAKAGES[breakage]
    assert kernel.read_text().count(right) == 1
    text = kernel.read_text().replace(right, wrong)
    if right.startswith("(0xff"):
        text = text.replace("0xffffffffu - static_cast<uint32_t>(best)", "static_cast<uint32_t>(best)")
    kernel.write_text(text)
    case = whole_case(30, 27, 40, 6, has_bias=True)
    case.router[30:] = 0  # of both signs
    case.router[30:, :32] = -0.0
    case.bias[30:] = 0
    case.x[3] = case.x[3].abs()
    with pytest.raises(AssertionError):
        assert_same_routes(case.run(emulated("route_rows", sources=sources)), case.run(None))


def test_wrong_tensors_are_refused() -> None:
    case = whole_case(2, 2, 8, 2)
    for change, message in (
        (
            {"choice": Choice(8, 9, False)},
            "top_k is 9 of 8 experts; it must be 1 to their number, at most 512",
        ),
        ({"choice": Choice(9, 2, False)}, "router is 8 x 64; it must have a row for each of 9 experts"),
        ({"x": case.x.float()}, "x has type fp32; it must be bf16"),
        ({"router": case.router[:, :32].contiguous()}, "router has shape"),
        ({"bias": case.router[:7, 0].contiguous()}, "bias has shape"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            dataclasses.replace(case, **change).run(emulated("route_rows"))
    with pytest.raises(InvalidArgumentError, match="of a multiple of 8 inputs"):
        whole_case(2, 2, 8, 2, 12).run(emulated("route_rows"))
    assert op.MAX_EXPERTS == 512


@pytest.mark.gpu
def test_on_a_gpu(on_gpu) -> None:
    module = on_gpu("route_rows")
    for shape in ((1, 1, 128, 8, 2048), (600, 590, 128, 8, 2048), (8192, 8192, 8, 2, 4096), (64, 64, 512, 10, 2048)):
        case = whole_case(*shape)
        assert_same_routes(case.run(module, "cuda"), case.run(None))
    case = random_case(64, 64, 128, 8, 2048)
    whole = case.run(module, "cuda")
    for row in (0, 5, 63):
        alone = dataclasses.replace(case, x=case.x[row : row + 1].contiguous(), num_used=1).run(module, "cuda")
        assert torch.equal(alone.logits[0], whole.logits[row])
        assert torch.equal(alone.weights[0], whole.weights[row])
