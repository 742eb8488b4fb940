"""Check the rows that early exit scores, and those that it keeps, between two segments of a target."""

from __future__ import annotations

import numpy as np

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.arrays import Int32Array


def check_listed(rows: Int32Array, num_hidden: int) -> None:
    """Raise InvalidArgumentError unless `rows` are ascending indices of num_hidden rows."""
    if rows.size and (rows[0] < 0 or rows[-1] >= num_hidden or (np.diff(rows) <= 0).any()):
        raise InvalidArgumentError(
            f"rows is {rows.tolist()}; it must list rows 0 to {num_hidden - 1} ascending, each once"
        )


def check_asked(rows: Int32Array, candidates: Int32Array, num_hidden: int, vocab_size: int, limit: int) -> None:
    """Raise ValueError unless candidates are [rows.size, at most limit], InvalidArgumentError if a row or a token does
    not exist."""
    if candidates.ndim != 2 or candidates.shape[0] != rows.size or candidates.shape[1] > limit:
        raise ValueError(f"{rows.size} rows need candidates [{rows.size}, n <= {limit}], not {list(candidates.shape)}")
    if rows.size and (rows.min() < 0 or rows.max() >= num_hidden):
        raise InvalidArgumentError(f"rows is {rows.tolist()}, allowed is 0 to {num_hidden - 1}")
    if candidates.size and candidates.max() >= vocab_size:
        raise InvalidArgumentError(f"candidates have token id {candidates.max()}, the largest is {vocab_size - 1}")
