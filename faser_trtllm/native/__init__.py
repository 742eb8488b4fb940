"""The native library (faser_cpu.h), loaded once through ctypes; its structures are in structures.py."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char, c_int32, c_void_p
from pathlib import Path
from typing import Any

from faser_trtllm.errors import FaserError, InvalidArgumentError, OutOfMemoryError
from faser_trtllm.native.signatures import SIGNATURES

ABI_VERSION = 25

FASER_OK = 0
FASER_BAD_ARGUMENT = -1
FASER_OUT_OF_MEMORY = -2
FASER_BAD_TOKEN = -3
FASER_BAD_POSITION = -4
FASER_BAD_BLOCK = -5

ROW_OK = 0
ROW_NAN = 1
ROW_EMPTY = 2

STILL_PENDING = 0
RECOVERED = 1
BONUS = 2
FAILED = 3

GREEDY = 0
SEEDED = 1
SAMPLED = 2

DRAFT_MODEL = 0
DRAFT_HEAD = 1
DRAFT_BLOCK = 2

BY_MODEL = 0
BY_SUFFIX = 1
BY_PREDICTION = 2  # counted as BY_SUFFIX
SOURCES = {"model": BY_MODEL, "suffix": BY_SUFFIX}  # by drafter

_LIBRARY = Path(__file__).parent.parent / "_native" / "libfaser_cpu.so"

_STATUS_SENTENCES = {
    FASER_BAD_ARGUMENT: "an argument is out of range",
    FASER_OUT_OF_MEMORY: "memory ran out",
    FASER_BAD_TOKEN: "a token id is outside the vocabulary",
    FASER_BAD_POSITION: "a position is outside the sequence length the engine was opened with",
    FASER_BAD_BLOCK: "a block id is outside the KV pool",
}


def address_of_buffer(buffer: Any) -> int:
    """Return the address of a numpy array's first element, four times as fast as numpy's own accessor.

    Only writable, C-contiguous, non-empty arrays are that fast.
    """
    try:
        return ctypes.addressof(c_char.from_buffer(buffer))
    except (TypeError, ValueError):
        address: int = buffer.__array_interface__["data"][0]
        return address


def address_of_function(function: Any) -> int:
    """Return the address of a FillMasks (structures.py); the caller keeps the function alive."""
    return ctypes.cast(function, c_void_p).value or 0


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library with its signatures declared; raise FaserError if it is missing or has another version."""
    if not _LIBRARY.exists():
        raise FaserError("native library not found, run ./build.sh setup")
    try:
        lib = ctypes.CDLL(str(_LIBRARY))
        lib.faser_abi_version.restype = c_int32
        version = lib.faser_abi_version()
    except (OSError, AttributeError) as error:
        raise FaserError(f"the native library cannot be loaded ({error}), run ./build.sh setup") from error
    if version != ABI_VERSION:
        raise FaserError(f"the native library has ABI version {version}, needed is {ABI_VERSION}; run ./build.sh setup")
    for name, (result, arguments) in SIGNATURES.items():
        try:
            function = getattr(lib, name)
        except AttributeError as error:
            raise FaserError(f"the native library lacks {name}, run ./build.sh setup") from error
        function.restype = result
        function.argtypes = arguments
    return lib


def isa() -> str:
    """Return the instruction set that this process uses: amxbf16, avx512bf16, avx2 or portable."""
    name: bytes = library().faser_isa()
    return name.decode()


def check(status: int, what: str) -> None:
    """Raise OutOfMemoryError or InvalidArgumentError for a negative faser_status. what: the start of the message."""
    if status >= FASER_OK:
        return
    sentence = f"{what} failed: {_STATUS_SENTENCES.get(status, f'status {status}')}"
    raise (OutOfMemoryError if status == FASER_OUT_OF_MEMORY else InvalidArgumentError)(sentence)
