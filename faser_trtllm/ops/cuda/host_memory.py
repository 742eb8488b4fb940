"""Page-locked host memory of our own.

torch's, when it is freed, records an event on every stream that copied it, and aborts the process if the driver
refuses, as a device that has failed does.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref
from typing import TYPE_CHECKING, Any

from faser_trtllm.errors import FaserError
from faser_trtllm.ops.cuda.module import call_driver, ensure_context, load_driver

if TYPE_CHECKING:
    import torch


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zeroed tensor in memory that is freed with the last tensor or array that shows it: copies from and to it must
    have ended by then. Raises FaserError of the driver, as where there is no such memory left."""
    import torch

    driver = load_driver()
    ensure_context(driver)
    num_items = math.prod(shape)
    num_bytes = max(1, num_items) * dtype.itemsize
    address = int(call_driver(driver, driver.cuMemHostAlloc, num_bytes, 0))
    ctypes.memset(address, 0, num_bytes)
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    weakref.finalize(memory, _free, driver, address).atexit = False  # a process that ends gives all of it back
    return torch.frombuffer(memory, dtype=dtype)[:num_items].view(shape)


def _free(driver: Any, address: int) -> None:
    with contextlib.suppress(FaserError):  # a device that has failed refuses, which others have said
        ensure_context(driver)
        call_driver(driver, driver.cuMemFreeHost, address)
