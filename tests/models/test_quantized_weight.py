"""Quantized matrices: the error is bounded by half a step, and what is stored is what was meant."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.mxfp4 import mxfp4_values
from faser_trtllm.models.quantized_weight import MXFP4, QuantizedWeight, Scheme, dequantize, from_integers, quantize
from lab.reference.quantized_weight import quantize_activations

SCHEMES = [Scheme(8, 0), Scheme(4, 32), Scheme(4, 128)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@given(seed=st.integers(0, 2**32 - 1), magnitude=st.sampled_from([1e-6, 0.02, 1.0, 300.0]))
def test_an_error_is_at_most_half_a_step(scheme: Scheme, seed: int, magnitude: float) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((5, 256)) * magnitude).astype(np.float32)
    weight[2] = 0
    quantized = quantize(weight, scheme)
    step = np.repeat(np.abs(quantized.scales), quantized.group_size, 1)
    # With 4 bits the entries opposite to the largest may exceed 7 steps: they are clipped by at most one.
    allowed = 0.5 if scheme.bits == 8 else 1.0
    assert (np.abs(dequantize(quantized) - weight) <= step * allowed * 1.0001).all()
    assert quantized.values.nbytes == weight.size * scheme.bits // 8


@given(st.integers(0, 2**32 - 1))
def test_four_bits_are_packed_as_documented(seed: int) -> None:
    integers = np.random.default_rng(seed).integers(-8, 8, (3, 64), np.int8)
    quantized = from_integers(integers, np.ones((3, 2), np.float32), 32, 4)
    np.testing.assert_array_equal(quantized.numbers(), integers)
    first = quantized.values[0, 0]
    assert (first & 15, first >> 4) == (integers[0, 0] % 16, integers[0, 1] % 16)


@given(seed=st.integers(0, 2**32 - 1), scale=st.integers(0, 250))
def test_mxfp4_of_what_was_in_mxfp4_is_the_same(seed: int, scale: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (6, 2, 16), np.uint8) & rng.integers(0, 256, (6, 2, 1), np.uint8)
    values = mxfp4_values(blocks, np.full((6, 2), scale, np.uint8) + rng.integers(0, 4, (6, 2), np.uint8))
    np.testing.assert_array_equal(dequantize(quantize(values, MXFP4)), values)


@given(st.integers(0, 2**32 - 1))
def test_mxfp4_takes_the_nearest_number(seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((3, 64), np.float32)
    quantized = quantize(weight, MXFP4)
    assert (np.exp2(np.rint(np.log2(quantized.scales))) == quantized.scales).all()
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    scaled = np.abs(weight.reshape(3, 2, 32) / quantized.scales[..., None])
    nearest = np.abs(scaled[..., None] - numbers).min(-1)
    found = np.abs(quantized.numbers().reshape(3, 2, 32))
    np.testing.assert_allclose(np.abs(found - scaled), nearest, atol=1e-6)
    assert (quantized.numbers() * weight >= 0).all()


def test_four_bits_use_all_sixteen_values() -> None:
    weight = np.linspace(-1, 1, 32, dtype=np.float32)[None] * np.float32(0.5)
    weight[0, 0] = -0.6
    assert set(quantize(weight, Scheme(4, 32)).numbers()[0].tolist()) >= {-8, 7}


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("none", None),
        ("int8", Scheme(8, 0)),
        ("W8A16", Scheme(8, 0)),
        ("int4", Scheme(4, 32)),
        ("W4A16:128", Scheme(4, 128)),
        ("int4:32", Scheme(4, 32)),
        ("W8A8", Scheme(8, 0, activation_bits=8)),
        ("W4A8", Scheme(4, 32, activation_bits=8)),
        ("W4A8:128", Scheme(4, 128, activation_bits=8)),
        ("mxfp4", MXFP4),
    ],
)
def test_spellings(text: str, scheme: Scheme | None) -> None:
    assert Scheme.parse(text) == scheme


@pytest.mark.parametrize("text", ["", "fp8", "int4:64", "int8:32", "int4:", "int2", "W8A8:32", "W2A8", "W4A8:64", "A8"])
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"quantization is .*int4:128"):
        Scheme.parse(text)


@pytest.mark.parametrize("text", ["int8", "int4:128", "W8A8", "W4A8:32"])
def test_a_scheme_is_written_as_it_is_read(text: str) -> None:
    assert str(Scheme.parse(text)) == text


@pytest.mark.parametrize(("group_size", "size"), [(0, 128), (32, 32), (128, 128)])
@given(seed=st.integers(0, 2**32 - 1))
def test_an_activation_errs_by_half_a_step_at_most(group_size: int, size: int, seed: int) -> None:
    """The step is that of the row's own group; the group's largest value is kept, and rows do not affect each other."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((4, 200)) * 10.0 ** rng.integers(-3, 3, (4, 1))).astype(np.float32)
    x[1, :size] = 0
    found = quantize_activations(x, group_size)
    for first in range(0, 200, size):
        group, its = x[:, first : first + size], found[:, first : first + size]
        most = np.abs(group).max(1, keepdims=True)
        assert (np.abs(its - group) <= most / 254 * 1.0001).all()
        np.testing.assert_allclose(np.abs(its).max(1, keepdims=True), most, rtol=1e-6)
    np.testing.assert_array_equal(quantize_activations(x[2:3], group_size), found[2:3])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="96 inputs are not a multiple of the group of 128"):
        quantize(np.zeros((2, 96), np.float32), Scheme(4, 128))
    with pytest.raises(ValueError, match="not finite"):
        quantize(np.full((2, 32), np.nan, np.float32), Scheme(8, 0))
    with pytest.raises(ValueError, match="no matrix in groups of 32"):
        QuantizedWeight(np.zeros((2, 64), np.int8), np.ones((2, 3), np.float32), 32, 8)
