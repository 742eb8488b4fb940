"""Log probabilities of tokens, and of the most probable tokens at their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.request import NO_TOP, Top
from faser_trtllm.ops.arrays import Float32Array, Float64Array, Int32Array, SamplingArray
from faser_trtllm.ops.probs import RowStatus, edited_logits, has_filters, next_token_probs


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Tokens, and the rows of logits that they came from."""

    rows: npt.NDArray[np.int64]  # [n]
    token_ids: Int32Array  # [n]
    positions: Int32Array  # [n]
    sampling: SamplingArray  # [n] (SAMPLING_DTYPE): parameters of the distribution to report
    num_top: Int32Array  # [n]: how many of the most probable tokens to report in addition

    def where(self, chosen: npt.NDArray[np.bool_] | slice) -> TokenRows:
        """Return the rows that a mask [n] or a slice chooses."""
        rows, token_ids, positions = self.rows[chosen], self.token_ids[chosen], self.positions[chosen]
        return TokenRows(rows, token_ids, positions, self.sampling[chosen], self.num_top[chosen])


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log probabilities of n tokens."""

    # [n]; -inf for a token of probability 0, which only synthetic acceptance commits; nan if there is no distribution.
    values: Float64Array
    tops: list[Top]  # [n], each of at most num_top tokens; ties are in order of token id

    @staticmethod
    def join(parts: Sequence[LogProbs]) -> LogProbs:
        """Concatenate the log probabilities of all parts."""
        return LogProbs(np.concatenate([part.values for part in parts]), [top for part in parts for top in part.tops])

    @staticmethod
    def merge(some: LogProbs, others: LogProbs, is_some: npt.NDArray[np.bool_]) -> LogProbs:
        """Merge in order: where is_some [n] is True take the next of `some`, else the next of `others`."""
        values = np.empty(is_some.size)
        values[is_some], values[~is_some] = some.values, others.values
        next_some, next_other = iter(some.tops), iter(others.tops)
        return LogProbs(values, [next(next_some if one else next_other) for one in is_some.tolist()])


def token_log_probs(logits: Float32Array, vocab_size: int, asked: TokenRows) -> LogProbs:
    """Return the tokens' log probabilities. logits fp32 [n, >= vocab_size]: row i is that of token i."""
    values = np.full(asked.rows.size, np.nan)
    tops: list[Top] = []
    probs = np.empty(vocab_size, np.float32)
    for i, padded in enumerate(logits):
        row = np.ascontiguousarray(padded[:vocab_size])
        position, num_top = int(asked.positions[i]), min(int(asked.num_top[i]), vocab_size)
        if next_token_probs(asked.sampling, i, row, position, probs) is not RowStatus.OK:
            tops.append((np.arange(num_top, dtype=np.int32), np.full(num_top, np.nan)) if num_top else NO_TOP)
            continue
        ids = np.append(_best(probs, num_top), asked.token_ids[i])
        found = probs[ids].astype(np.float64)
        with np.errstate(divide="ignore"):
            logs = np.log(found)
        if not found.all() and not has_filters(asked.sampling[i]):
            # Some probabilities are too small for a float32, but logits still distinguish such tokens.
            scaled = _scaled_logits(asked.sampling, i, row, position)
            ids = np.append(_best(scaled, num_top), asked.token_ids[i])
            found = probs[ids].astype(np.float64)
            with np.errstate(divide="ignore"):
                logs = np.where(found > 0, np.log(found), scaled[ids] + np.log(np.float64(probs.max())))
        values[i] = logs[-1]
        tops.append((ids[:-1].astype(np.int32), logs[:-1].copy()) if num_top else NO_TOP)
    return LogProbs(values, tops)


def _best(scores: npt.NDArray[Any], num: int) -> npt.NDArray[np.int64]:
    """Return the indices of the `num` largest scores, in order; of equal ones, the lowest index is first."""
    if num < 2:
        return np.array([scores.argmax()] if num else [], np.int64)
    least = np.partition(scores, scores.size - num)[scores.size - num]
    near = np.flatnonzero(scores >= least)
    return near[np.argsort(-scores[near], kind="stable")][:num]


def _scaled_logits(sampling: SamplingArray, slot: int, row: Float32Array, position: int) -> Float64Array:
    """Return edited logits over temperature [vocab_size], with a maximum of 0."""
    _, edited = edited_logits(sampling, slot, row, position)
    scaled: Float64Array = (edited.astype(np.float64) - float(edited.max())) / float(sampling["temperature"][slot])
    return scaled
