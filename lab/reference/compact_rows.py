"""Reference of Engine.compact_rows."""

from __future__ import annotations

from faser_trtllm.ops.arrays import Float32Array, Int32Array
from faser_trtllm.ops.boundary_checks import check_listed


def compact_rows_reference(hidden: Float32Array, rows: Int32Array) -> Float32Array:
    """Return the listed hidden rows [rows.size, hidden_size]; check_listed() raises for invalid ones."""
    check_listed(rows, hidden.shape[0])
    kept: Float32Array = hidden[rows].copy()
    return kept
