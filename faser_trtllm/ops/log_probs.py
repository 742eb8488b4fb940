"""The log probabilities of committed tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from faser_trtllm.ops.arrays import Float32Array, Int32Array, SamplingArray
from faser_trtllm.ops.probs import next_token_probs


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Tokens, and the rows of logits that they came from.

    rows int64 [n]; token_ids and positions int32 [n]; sampling [n] (SAMPLING_DTYPE): with the distribution meant.
    """

    rows: npt.NDArray[np.int64]
    token_ids: Int32Array
    positions: Int32Array
    sampling: SamplingArray


def token_log_probs(logits: Float32Array, vocab_size: int, asked: TokenRows) -> npt.NDArray[np.float64]:
    """Log probabilities [n] of the tokens; logits [n, >= vocab_size]: the rows asked for, in order.

    -inf for a token of probability 0, which is committed only if acceptance is synthetic.
    """
    found = np.empty(asked.rows.size, np.float64)
    probs = np.empty(vocab_size, np.float32)
    for i, row in enumerate(logits):
        next_token_probs(asked.sampling, i, np.ascontiguousarray(row), int(asked.positions[i]), probs)
        found[i] = probs[asked.token_ids[i]]
    with np.errstate(divide="ignore"):
        return np.log(found)
