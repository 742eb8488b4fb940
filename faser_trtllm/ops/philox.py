"""Philox4x32-10 in numpy, bit-identical to plugins/cpu/sampling/philox.h."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


class Stream(enum.IntEnum):
    """The purpose of a random number, which is the fourth counter word."""

    GUMBEL = 0
    TEST = 1
    RECOVER = 2
    BONUS = 3
    DRAFT = 4
    GUMBEL_LOW = 5


def philox4x32(counter: npt.ArrayLike, key: int) -> npt.NDArray[np.uint64]:
    """Return [..., 4] 32-bit words, held in uint64, for counter [..., 4] of 32-bit words and a 64-bit key."""
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter, np.uint64), -1, 0)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(_ROUNDS):
        a = np.uint64(_MULTIPLIERS[0]) * c0
        b = np.uint64(_MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (
            (b >> _SHIFT) ^ c1 ^ np.uint64(k0),
            b & _MASK,
            (a >> _SHIFT) ^ c3 ^ np.uint64(k1),
            a & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & 0xFFFFFFFF
        k1 = (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1)
