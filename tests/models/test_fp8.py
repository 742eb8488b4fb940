"""e4m3 numbers and matrices of them, against torch's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from faser_trtllm.models.fp8 import NUMBERS, Fp8Matrix, e4m3_from_float32, quantize, scale_of, stack


def torchs(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def random_numbers(count: int) -> np.ndarray:
    """Return numbers of all sizes, from far below the smallest e4m3 number to beyond the largest."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-5, 4, count)).astype(np.float32)


def test_rounding_is_torchs() -> None:
    finite = NUMBERS[np.isfinite(NUMBERS)]
    halfway = (finite[:-1] + finite[1:]) / 2  # ties, which go to even
    values = np.concatenate([random_numbers(1 << 16), finite, halfway, np.nextafter(halfway, np.float32(0))])
    np.testing.assert_array_equal(e4m3_from_float32(values), torchs(values))


def test_what_is_too_large_saturates_and_nan_stays() -> None:
    values = np.array([448, 464, 465, 1e30, np.inf, -449, -np.inf, -0.0, np.nan], np.float32)
    found = NUMBERS[e4m3_from_float32(values)]
    np.testing.assert_array_equal(found, np.array([448] * 5 + [-448, -448, -0.0, np.nan], np.float32))
    assert np.signbit(found[7])


def test_one_scale_brings_the_largest_number_to_448() -> None:
    parts = [np.array([[1.0, -3.5], [0.25, 0.0]], np.float32), np.array([[0.5, 7.0]], np.float32)]
    matrix = quantize(parts)
    assert matrix.scales == np.float32(7 / 448)
    np.testing.assert_array_equal(NUMBERS[matrix.bits] * matrix.scales, np.concatenate(parts))
    assert quantize([np.zeros((2, 2), np.float32)]).scales == scale_of(0.0) == 1


def test_equal_scales_and_scales_per_output_keep_every_number() -> None:
    bits = np.arange(24, dtype=np.uint8).reshape(6, 4)
    one, other = Fp8Matrix(bits[:4], np.array(0.5, np.float32)), Fp8Matrix(bits[4:], np.array(0.5, np.float32))
    same = stack([one, other])
    np.testing.assert_array_equal(same.bits, bits)
    assert same.scales.shape == ()
    per_output = Fp8Matrix(bits[4:], np.array([0.25, 3], np.float32))
    mixed = stack([one, per_output])
    np.testing.assert_array_equal(mixed.bits, bits)
    np.testing.assert_array_equal(mixed.scales, np.array([0.5, 0.5, 0.5, 0.5, 0.25, 3], np.float32))


def test_different_scales_become_the_largest() -> None:
    bits = e4m3_from_float32(random_numbers(300 * 4).reshape(300, 4))
    scales = [np.array(value, np.float32) for value in (0.03, 0.11)]
    found = stack([Fp8Matrix(bits, scales[0]), Fp8Matrix(bits, scales[1])])
    assert found.scales == scales[1]
    np.testing.assert_array_equal(found.bits[300:], bits)
    np.testing.assert_array_equal(found.bits[:300], torchs(NUMBERS[bits] * scales[0] / scales[1]))


@pytest.mark.parametrize(
    ("scales", "message"),
    [([1.0, 1.0, 1.0], r"scales \[3\] do not fit"), (0.0, "not positive and finite"), (np.inf, "not positive")],
)
def test_scales_that_tensorrt_refuses(scales: list[float] | float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fp8Matrix(np.zeros((2, 4), np.uint8), np.array(scales, np.float32))


def test_weights_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="a weight is not finite"):
        quantize([np.array([[1.0, np.nan]], np.float32)])
