"""Frees of the virtual GPU's memory that wait until the driver takes them, as while a stream captures."""

from __future__ import annotations

from faser_trtllm.errors import FaserError
from tests.virtual_gpu.device.streams import call, is_capturing

_LOST_STREAM = ("INVALID_HANDLE", "CONTEXT_IS_DESTROYED")

_waiting: list[tuple[str, int, tuple[int, ...]]] = []


def free_or_wait(name: str, address: int, *stream: int) -> None:
    """Call cuMemFree, or cuMemFreeAsync with a stream; where the stream is gone, on the null stream."""
    try:
        call(name, address, *stream)
    except FaserError as error:
        is_lost = any(lost in str(error) for lost in _LOST_STREAM)
        if is_lost and any(stream):
            free_or_wait(name, address, 0)
        else:
            _waiting.append((name, address, stream))


def retry() -> None:
    """Free what had to wait."""
    if _waiting and not is_capturing():
        waiting, _waiting[:] = _waiting[:], []
        for name, address, stream in waiting:
            free_or_wait(name, address, *stream)
