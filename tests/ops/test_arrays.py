"""Addresses of numpy arrays, the quick way and the slow one."""

import numpy as np
import pytest

from faser_trtllm.native import address_of_buffer


def readonly():
    array = np.arange(4, dtype=np.int32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        np.arange(8, dtype=np.int32),
        np.arange(8, dtype=np.int32)[3:],
        np.zeros((3, 4), np.float32)[1:, :2],
        np.zeros((2, 3), np.float32).T,
        np.zeros(0, np.int32),
        readonly(),
    ],
    ids=["whole", "part", "rows apart", "transposed", "empty", "read-only"],
)
def test_it_is_numpys_own(array):
    assert address_of_buffer(array) == array.ctypes.data
