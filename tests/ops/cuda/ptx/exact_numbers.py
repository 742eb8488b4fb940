"""Numbers at the edges of their types, and what they are exactly."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

FLOAT_EDGES = [0.0, -0.0, 1.0, -1.0, 1.5, 3.0, -7.25, 0.1, 1e-45, -1e-40, 1.17549435e-38, 3.4e38, -3.4e38, 16777217.0]
FLOAT_EDGES += [math.inf, -math.inf, math.nan, 2.0**-12, 1 + 2.0**-23, 1 - 2.0**-24]


def signed(value: int, bits: int = 32) -> int:
    return value - (1 << bits) if value >> bits - 1 & 1 else value


def rounded(exact: Fraction, mode: str) -> np.float32:
    """A fraction in float32, by comparing it with its neighbours."""
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    finite = [x for x in around if np.isfinite(x)]
    below = max(x for x in finite if Fraction(float(x)) <= exact)
    above = min(x for x in finite if Fraction(float(x)) >= exact)
    if mode == "rm" or (mode == "rz" and exact > 0):
        return below
    if mode == "rp" or mode == "rz":
        return above
    low, high = exact - Fraction(float(below)), Fraction(float(above)) - exact
    is_even = below.view(np.uint32) % 2 == 0
    return below if low < high or (low == high and is_even) else above
