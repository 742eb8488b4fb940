"""The set_conditional kernel, run on the CPU as it is. The virtual GPU runs it in graphs: tests/virtual_gpu."""

from __future__ import annotations

import ctypes

import pytest
import torch

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.set_conditional import set_conditional
from tests.ops.cuda.emulation import emulated


def test_the_condition_is_the_number_on_the_device() -> None:
    condition = ctypes.c_uint32(77)  # the emulator's handles are addresses
    handle = ctypes.addressof(condition)
    for number in (3, 0, 2**31 - 1):
        set_conditional(emulated("set_conditional"), torch.tensor([number], dtype=torch.int32), handle)
        assert condition.value == number


def test_without_a_number_nothing_is_set() -> None:
    condition = ctypes.c_uint32(77)
    set_conditional(emulated("set_conditional"), None, ctypes.addressof(condition))
    set_conditional(emulated("set_conditional"), None, 0)
    assert condition.value == 77


def test_one_int32_is_expected() -> None:
    for value in (torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)):
        with pytest.raises(InvalidArgumentError, match="value"):
            set_conditional(None, value, 1)  # type: ignore[arg-type]
