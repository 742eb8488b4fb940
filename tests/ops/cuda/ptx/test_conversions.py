"""cvt and approximations, against torch's conversions and Python's exact numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.ops.cuda.ptx.exact_numbers import FLOAT_EDGES, rounded, signed
from tests.ops.cuda.ptx.snippet import interpret


def floats(count: int = 1024) -> np.ndarray:
    """float32 of all sizes, the middles between small floats of 8 and 16 bits among them."""
    rng = np.random.default_rng(4)
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    bits[: count // 4] = bits[: count // 4] & 0xFFFF0000 | 0x8000
    found = bits.view(np.float32).copy()
    small = rng.integers(-(1 << 8), 1 << 8, count // 4) / 2.0 ** rng.integers(0, 14, count // 4)
    found[-(count // 4) :] = small
    found[count // 2 : count // 2 + len(FLOAT_EDGES)] = np.array(FLOAT_EDGES).astype(np.float32)
    return found


def test_conversions_to_small_floats_are_torch_s():
    """bf16, f16 and e4m3, to nearest with ties to even; of two numbers the first becomes the upper half."""
    x = floats()
    y = x[::-1].copy()
    text = """
    cvt.rn.bf16.f32 %d0, %a0; cvt.rn.f16.f32 %d1, %a0; cvt.rn.satfinite.e4m3x2.f32 %d2, %a0, %a1;
    cvt.rn.bf16x2.f32 %d3, %a0, %a1; cvt.rn.f16x2.f32 %d4, %a0, %a1;"""
    b16, f16, e4m3, b16s, f16s = interpret(text, [x, y], ("u2", "u2", "u2", "u4", "u4"))
    upper, lower = torch.from_numpy(x), torch.from_numpy(y)

    def bits(tensor: torch.Tensor, kind: torch.dtype, nan: int) -> np.ndarray:
        found = (
            tensor.to(kind).view(torch.int16 if kind.itemsize == 2 else torch.uint8).numpy().view(f"u{kind.itemsize}")
        )
        return np.where(tensor.isnan().numpy(), nan, found).astype(np.uint32)

    assert b16.tolist() == bits(upper, torch.bfloat16, 0x7FFF).tolist()
    assert f16.tolist() == bits(upper, torch.float16, 0x7FFF).tolist()
    for found, kind, nan, shift in (
        (b16s, torch.bfloat16, 0x7FFF, 16),
        (f16s, torch.float16, 0x7FFF, 16),
        (e4m3, torch.float8_e4m3fn, 0x7F, 8),
    ):
        high, low = (t.clamp(-448, 448) if shift == 8 else t for t in (upper, lower))
        assert found.tolist() == (bits(high, kind, nan) << shift | bits(low, kind, nan)).tolist()


def test_conversions_from_small_floats():
    codes = np.arange(1024, dtype=np.uint32) * np.uint32(0x010101) % np.uint32(65536)
    bits = (np.arange(1024) * 64 + 17).astype(np.uint16)
    text = "cvt.u16.u32 %h, %a0; cvt.rn.f16x2.e4m3x2 %d0, %h; cvt.f32.bf16 %d1, %a1; cvt.f32.f16 %d2, %a1;"
    pair, b16, f16 = interpret(text, [codes, bits], ("u4", "f4", "f4"), ".reg .b16 %h;")
    wanted = torch.from_numpy(codes.astype(np.uint16).view(np.uint8)).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(pair.view(np.float16).astype(np.float32), wanted)
    half = torch.from_numpy(bits.view(np.int16))
    np.testing.assert_array_equal(b16, half.view(torch.bfloat16).float().numpy())
    np.testing.assert_array_equal(f16, half.view(torch.float16).float().numpy())


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_integers_become_floats(mode):
    rng = np.random.default_rng(5)
    x = rng.integers(0, 1 << 63, 64, dtype=np.uint64) << rng.integers(0, 2, 64, dtype=np.uint64)
    x[:4] = [0, (1 << 64) - 1, (1 << 24) + 1, (1 << 53) + 1]
    text = (
        f"cvt.{mode}.f32.u64 %d0, %a0; cvt.{mode}.f32.s64 %d1, %a0; cvt.u32.u64 %x0, %a0; cvt.{mode}.f32.s32 %d2, %x0;"
    )
    found = interpret(text, [x], ("f4", "f4", "f4"))
    for i, value in enumerate(x.tolist()):
        for output, exact in zip(found, (value, signed(value, 64), signed(value % 2**32)), strict=True):
            assert output[i] == rounded(Fraction(exact), mode)


@pytest.mark.parametrize(("mode", "law"), [("rni", round), ("rzi", int), ("rmi", math.floor), ("rpi", math.ceil)])
def test_floats_become_integers(mode, law):
    """Cut off at the type's limits; NaN is 0 in 32 bits and the top bit in 64."""
    x = floats()
    text = f"cvt.{mode}.s32.f32 %d0, %a0; cvt.{mode}.u32.f32 %d1, %a0; cvt.{mode}.u64.f32 %d2, %a0;"
    found = interpret(text, [x], ("i4", "u4", "u8"))
    for output in found:
        limits = np.iinfo(output.dtype)
        for value, got in zip(x.tolist(), output.tolist(), strict=True):
            if math.isnan(value):
                assert got == (1 << 63 if limits.bits == 64 else 0)
            elif math.isinf(value):
                assert got == (limits.max if value > 0 else limits.min)
            else:
                assert got == min(max(law(value), limits.min), limits.max)


def test_saturation_and_flushing():
    x = floats()
    text = "cvt.sat.f32.f32 %d0, %a0; add.ftz.f32 %d1, %a0, %x0; cvt.rni.f32.f32 %d2, %a0;"
    limited, sums, whole = interpret("mov.b32 %x0, 0f00000000;" + text, [x], ("f4", "f4", "f4"))
    np.testing.assert_array_equal(limited, np.clip(np.nan_to_num(x, nan=0.0), 0, 1))
    np.testing.assert_array_equal(sums, np.where(np.abs(x) < 2.0**-126, 0, x))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(whole, np.rint(x))


@pytest.mark.parametrize(
    ("name", "law"), [("ex2", np.exp2), ("lg2", np.log2), ("rcp", np.reciprocal), ("sqrt", np.sqrt)]
)
def test_approximations_are_rounded_values(name, law):
    x = floats()
    (found,) = interpret(f"{name}.approx.ftz.f32 %d0, %a0;", [x], ("f4",))
    with np.errstate(all="ignore"):
        wanted = law(np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x).astype(np.float64)).astype(np.float32)
    tiny = np.abs(wanted) < 2.0**-126
    np.testing.assert_array_equal(found, np.where(tiny, 0, wanted))
