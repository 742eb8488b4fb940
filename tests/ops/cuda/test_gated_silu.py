"""The gated_silu kernel, run on the CPU as it is, against its reference; and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda import gated_silu as op
from faser_trtllm.ops.cuda.quantize_rows import quantize_rows
from lab.reference.cuda.gated_silu import gated_silu_reference
from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.silu_case import EPS, Case, assert_near, assert_same, run_scaled
from tests.support.effort import examples


def test_the_reference_is_a_norm_and_an_activation() -> None:
    """RMSNorm, the product, SiLU and a multiplication by torch, in float64; sums beyond fp16's range are kept."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn((5, 64), generator=generator).half(), torch.randn((96, 64), generator=generator)
    hidden[1] *= 9000
    product = hidden.double() @ weight.double().t()
    assert product[1].abs().max() > 65504
    normed = torch.nn.functional.rms_norm(hidden.double(), (64,), None, EPS) @ weight.double().t()
    out = torch.empty((5, 48), dtype=torch.float16)
    gated_silu_reference(product.float(), hidden, None, EPS, out)
    gate, up = normed.chunk(2, -1)
    assert_near(out, (torch.nn.functional.silu(gate) * up).half())


@settings(max_examples=examples(30))
@given(
    num_rows=st.integers(1, 4),
    inner=st.sampled_from([8, 72, 4096, 4104]),
    hidden_size=st.sampled_from([8, 64, 4160]),
    dtype=st.sampled_from(["bf16", "fp16"]),
    has_bias=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_the_kernel_is_the_reference(num_rows, inner, hidden_size, dtype, has_bias, seed) -> None:
    case = Case(num_rows, inner, hidden_size, dtype, has_bias, seed)
    assert_near(case.run(emulated("gated_silu")), case.reference())


@settings(max_examples=examples(20))
@given(
    num_rows=st.integers(1, 3),
    inner=st.sampled_from([8, 72, 4096, 4104, 8 * 4096]),
    hidden_size=st.sampled_from([8, 4160]),
    has_bias=st.booleans(),
    order=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
def test_in_e4m3_it_is_what_would_be_quantized(num_rows, inner, hidden_size, has_bias, order, seed) -> None:
    case = Case(num_rows, inner, hidden_size, "bf16", has_bias, seed)
    assert_same(run_scaled(case, emulated("gated_silu", order=order)), quantize_rows(case.run(emulated("gated_silu"))))


def test_rows_that_one_block_does_not_hold_are_refused() -> None:
    case = Case(1, 8 * 4096 + 8, 8, "bf16", False, 0)
    with pytest.raises(InvalidArgumentError, match="out has rows of 32776; at most 32768 are quantized by one block"):
        run_scaled(case, None)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_row_depends_on_no_other_row_and_no_order_of_threads(order: int) -> None:
    case = Case(4, 136, 520, "bf16", True, 1)
    whole = case.run(emulated("gated_silu"))
    case.hidden, case.gate_up = case.hidden[2:3].clone(), case.gate_up[2:3].clone()
    assert torch.equal(case.run(emulated("gated_silu", order=order)), whole[2:3])


def test_wrong_tensors_are_refused() -> None:
    case = Case(2, 16, 32, "fp16", True, 0)
    out = case.reference()
    cases = [
        ((case.gate_up, case.hidden, case.bias, EPS, out.float()), "out has type fp32; it must be bf16 or fp16"),
        ((case.gate_up, case.hidden, case.bias, EPS, out[:, :12]), "out has rows of 12; it must be a multiple of 8"),
        ((case.gate_up, case.hidden[:, :12], case.bias, EPS, out), "hidden has rows of 12; it must be a multiple of 8"),
        ((case.gate_up.half(), case.hidden, case.bias, EPS, out), "gate_up has type fp16; it must be fp32"),
        ((case.gate_up, case.hidden[:1], case.bias, EPS, out), "hidden has shape"),
        ((case.gate_up, case.hidden, case.bias[:16], EPS, out), "bias has shape"),
    ]
    for arguments, message in cases:
        with pytest.raises(InvalidArgumentError, match=message):
            op.launch(None, *arguments)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_on_a_gpu(on_gpu, dtype: str) -> None:
    module = on_gpu("gated_silu")
    for shape in ((1, 64, 64), (200, 14336, 4096), (3, 4104, 8)):
        case = Case(*shape, dtype, True, 0)
        assert_near(case.run(module, "cuda"), case.reference())
        if dtype == "bf16":
            assert_same(run_scaled(case, module, "cuda"), quantize_rows(case.run(module, "cuda")))
