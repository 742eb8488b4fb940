"""Drop rows between two segments: the effect of Engine.compact_rows on the hidden rows."""

from __future__ import annotations

import numpy as np

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.arrays import Int32Array


def check_listed(rows: Int32Array, num_hidden: int) -> None:
    """Raise InvalidArgumentError unless `rows` are indices of num_hidden rows, ascending."""
    if rows.size and (rows[0] < 0 or rows[-1] >= num_hidden or (np.diff(rows) <= 0).any()):
        raise InvalidArgumentError(
            f"rows is {rows.tolist()}, it must list rows 0 to {num_hidden - 1} ascending, each once"
        )
