"""Columns of a step, as int32 arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_trtllm.ops.arrays import Int32Array


def columns(*values: Sequence[int]) -> list[Int32Array]:
    """An array of each."""
    return [np.array(column, np.int32) for column in values]
