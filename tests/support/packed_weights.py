"""Packed matrices of engine files as they were before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def unpack_matrix(packed: npt.NDArray[np.uint32], num_out: int, num_in: int) -> npt.NDArray[np.uint16]:
    """Undo pack_matrix -> bf16 bits [num_out, num_in]."""
    rows = np.ascontiguousarray(packed.transpose(0, 2, 1)).reshape(-1, packed.shape[1])
    return rows.view("<u2")[:num_out, :num_in]
