"""Early exit: the target's scores of the draft's candidates between segments (FASER's Top-K signal, arXiv 2604.20503).

plugins/cpu/early_exit.cpp computes the scores inside the engine (Engine.early_exit).
"""

from __future__ import annotations

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.arrays import Int32Array


def check_asked(rows: Int32Array, candidates: Int32Array, num_hidden: int, vocab_size: int, limit: int) -> None:
    """Raise ValueError unless candidates are [rows.size, at most limit], InvalidArgumentError for a hidden row or a
    token that does not exist."""
    if candidates.ndim != 2 or candidates.shape[0] != rows.size or candidates.shape[1] > limit:
        raise ValueError(f"{rows.size} rows need candidates [{rows.size}, n <= {limit}], not {list(candidates.shape)}")
    if rows.size and (rows.min() < 0 or rows.max() >= num_hidden):
        raise InvalidArgumentError(f"rows is {rows.tolist()}, allowed is 0 to {num_hidden - 1}")
    if candidates.size and candidates.max() >= vocab_size:
        raise InvalidArgumentError(f"candidates have token id {candidates.max()}, the largest is {vocab_size - 1}")
