"""Philox4x32-10 in numpy, bit for bit as plugins/cpu/sampling/philox.h: pure functions of a number's purpose."""

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


def uniform(key: int, index: int, stream: Stream) -> float:
    """Return the number in [0, 1), 53 bits, of (key, index, stream); index is a position or the draft counter."""
    words = philox4x32([index & 0xFFFFFFFF, index >> 32, 0, stream], key)
    return float((int(words[1]) << 32 | int(words[0])) >> 11) * 2.0**-53


def gumbel_uniforms(key: int, position: int, vocab_size: int) -> npt.NDArray[np.float64]:
    """Return [vocab_size] numbers in (0, 1), 52 bits, each a function of (key, position, token) alone."""
    tokens = np.arange(vocab_size)
    counter = np.zeros((vocab_size, 4), np.uint64)
    counter[:, 0] = position & 0xFFFFFFFF
    counter[:, 1] = position >> 32
    counter[:, 2] = tokens // 64 * 16 + tokens % 16
    counter[:, 3] = Stream.GUMBEL
    high = philox4x32(counter, key)[tokens, tokens % 64 // 16]
    counter[:, 2] = tokens
    counter[:, 3] = Stream.GUMBEL_LOW
    low = philox4x32(counter, key)[:, 0]
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    uniforms: npt.NDArray[np.float64] = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return uniforms
