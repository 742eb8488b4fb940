"""References of ops/philox.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.ops.philox import Stream, philox4x32


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
