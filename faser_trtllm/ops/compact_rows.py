"""Drop rows between two segments: the effect of Engine.compact_rows on the hidden rows."""

from __future__ import annotations

import numpy as np

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.arrays import Float32Array, Int32Array


def compact_rows_reference(hidden: Float32Array, rows: Int32Array) -> Float32Array:
    """Return the listed hidden rows [rows.size, hidden_size]; raises as check_listed."""
    check_listed(rows, hidden.shape[0])
    kept: Float32Array = hidden[rows].copy()
    return kept


def check_listed(rows: Int32Array, num_hidden: int) -> None:
    """Raise InvalidArgumentError unless `rows` are indices of num_hidden rows, ascending."""
    if rows.size and (rows[0] < 0 or rows[-1] >= num_hidden or (np.diff(rows) <= 0).any()):
        raise InvalidArgumentError(
            f"rows is {rows.tolist()}, it must list rows 0 to {num_hidden - 1} ascending, each once"
        )
