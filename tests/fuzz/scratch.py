"""Files of fuzz targets: one folder a process, in memory where there is such a file system, removed at its end."""

from __future__ import annotations

import functools
import json
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

from faser_trtllm.errors import FaserError
from faser_trtllm.json_text import parse_json
from tests.fuzz.target import Codec

_MEMORY = Path("/dev/shm")


class Scratch:
    """Removes its folder with the process; forked children leave it alone."""

    def __init__(self) -> None:
        where = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="faser-fuzz-", dir=where))
        self._owner = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._owner:
            shutil.rmtree(self.folder, ignore_errors=True)


@functools.cache
def _scratch() -> Scratch:
    return Scratch()


def folder(name: str) -> Path:
    """A folder of this name, made on the first call."""
    path = _scratch().folder / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def put(name: str, data: bytes) -> Path:
    """A file of this name and content."""
    path = _scratch().folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def from_json(data: bytes, kind: type) -> Any:
    """A value of this kind; FaserError for an input that is none, which is no fault of the parser."""
    try:
        value = parse_json(data)
    except ValueError as error:
        raise FaserError("no input") from error
    if not isinstance(value, kind):
        raise FaserError("no input")
    return value


def to_json(value: Any) -> bytes:
    """Bytes stand for themselves."""
    return value if isinstance(value, bytes) else json.dumps(value).encode()


JSON = Codec(json.loads, to_json)


def headed(prefix: struct.Struct, constants: tuple[Any, ...]) -> Codec:
    """Codec of files that begin with constants, the length of a JSON header and the header: [header, rest]."""

    def decode(data: bytes) -> Any:
        *_, length = prefix.unpack_from(data)
        end = prefix.size + length
        return [json.loads(data[prefix.size : end]), data[end:]]

    def encode(value: Any) -> bytes:
        header, rest = value
        text = to_json(header)
        return prefix.pack(*constants, len(text)) + text + rest

    return Codec(decode, encode)
