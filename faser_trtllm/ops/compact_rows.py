"""Drop rows between two segments: the effect of Engine.compact_rows on the hidden rows."""

from __future__ import annotations

import numpy as np

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.arrays import Float32Array, Int32Array


def compact_rows_reference(hidden: Float32Array, rows: Int32Array) -> Float32Array:
    """The hidden rows listed [rows.size, hidden_size]; InvalidArgumentError unless they ascend and exist."""
    if rows.size and (rows[0] < 0 or rows[-1] >= hidden.shape[0] or (np.diff(rows) <= 0).any()):
        raise InvalidArgumentError(
            f"rows is {rows.tolist()}, it must list rows 0 to {hidden.shape[0] - 1} ascending, each once"
        )
    kept: Float32Array = hidden[rows].copy()
    return kept
