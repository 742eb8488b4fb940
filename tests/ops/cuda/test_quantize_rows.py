"""The quantize_rows kernel, run on the CPU as it is, against torch's; and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows, launch, launch_add, quantize_rows
from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.quantized_rows import assert_same, every_number, random_rows, run
from tests.support.effort import examples


@given(st.integers(1, 5), st.sampled_from([16, 48, 2048, 2064, 4112]), st.integers(0, 10**6))
@settings(max_examples=examples(30))
def test_the_kernel_is_the_reference(num_rows: int, width: int, seed: int) -> None:
    x = random_rows(num_rows, width, seed)
    assert_same(run(emulated("quantize_rows"), x), quantize_rows(x))


@given(st.integers(1, 5), st.sampled_from([16, 48, 2048, 2064, 4112]), st.integers(0, 10**6))
@settings(max_examples=examples(30))
def test_a_product_is_added_before(num_rows: int, width: int, seed: int) -> None:
    x, hidden = random_rows(num_rows, width, seed), random_rows(num_rows + 1, width, seed + 1)
    wanted = hidden.clone()
    wanted[:-1] += x
    values = torch.full((num_rows + 1, width), 7.0).to(torch.float8_e4m3fn)
    scales = torch.full((num_rows + 1, 1), 7.0)
    launch_add(emulated("quantize_rows"), x, hidden[:-1], ScaledRows(values[:-1], scales[:-1]))
    assert torch.equal(hidden, wanted), "in place, and nothing behind the last row"
    assert_same(ScaledRows(values[:-1], scales[:-1]), quantize_rows(wanted[:-1]))
    assert (values[-1].float() == 7).all()
    assert scales[-1] == 7


@pytest.mark.parametrize("beside", [0.0, 448.0])
def test_every_number_is_rounded_as_torch_does(beside: float) -> None:
    """Ties, zeros of both signs, both ends of every binade; beside 448 small numbers become e4m3's subnormals and 0."""
    x = every_number(beside)
    assert len(x) == 254
    assert_same(run(emulated("quantize_rows"), x), quantize_rows(x))


def test_nan_stays_and_harms_no_other_row() -> None:
    x = random_rows(3, 32, 0)
    x[1, 5] = float("nan")
    found = run(emulated("quantize_rows"), x)
    assert found.dequantized()[1, 5].isnan()
    assert torch.equal(found.values[::2].view(torch.uint8), quantize_rows(x[::2]).values.view(torch.uint8))


def test_wrong_tensors_are_refused() -> None:
    x = random_rows(2, 32, 0)
    rows = ScaledRows(torch.zeros(2, 32).to(torch.float8_e4m3fn), torch.zeros(2, 1))
    cases = [
        (x[:, :24].contiguous(), rows, "x has rows of 24 at address"),
        (x.half(), rows, r"x has type fp16; it must be bf16"),
        (x, ScaledRows(rows.values[:1], rows.scales), r"values has shape \[1, 32\]; it must be \[2, 32\]"),
        (x, ScaledRows(rows.values, rows.scales[:, 0]), r"scales has shape \[2\]; it must be \[2, 1\]"),
    ]
    for given_x, found, message in cases:
        with pytest.raises(InvalidArgumentError, match=message):
            launch(None, given_x, found)  # type: ignore[arg-type]


def test_a_residual_of_another_shape_is_refused() -> None:
    x, rows = random_rows(2, 32, 0), ScaledRows(torch.zeros(2, 32).to(torch.float8_e4m3fn), torch.zeros(2, 1))
    for hidden, message in ((x[:1], r"hidden has shape \[1, 32\]"), (x.float(), r"hidden has type fp32")):
        with pytest.raises(InvalidArgumentError, match=message):
            launch_add(None, x, hidden, rows)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_on_a_gpu(on_gpu) -> None:
    module = on_gpu("quantize_rows")
    for x in (every_number(0.0), every_number(448.0), random_rows(200, 4096, 0), random_rows(3, 14336, 1)):
        found = run(module, x.cuda())
        assert_same(ScaledRows(found.values.cpu(), found.scales.cpu()), quantize_rows(x))
        hidden, rows = x.flip(0).contiguous().cuda(), ScaledRows(found.values, found.scales)
        launch_add(module, x.cuda(), hidden, rows)
        wanted = x + x.flip(0)
        assert torch.equal(hidden.cpu(), wanted)
        assert_same(ScaledRows(rows.values.cpu(), rows.scales.cpu()), quantize_rows(wanted))
