"""The errors users see. Each message is one sentence: the field, the value, the limit and the fix."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

_MAX_VALUE_CHARS = 64
_SPOKEN = {"prompt": "the prompt", "prompt_tokens": "the prompt"}
"""Fields of requests that no client sends under that name, as a sentence calls them."""


class FaserError(Exception):
    """Base of all errors meant for users; `code` is the Triton status it maps to.

    field, value, limit: the field at fault, what it is and what is allowed, as text, where the error is about a field.
    A prompt that is too long for the engine has the field "prompt_tokens" and as limit the number that it takes.
    """

    code = "INTERNAL"

    def __init__(self, message: str, field: str | None = None, value: object = None, limit: object = None) -> None:
        """message: the sentence, or with a field what follows the field's name: "is -1, allowed is 0 to 2"."""
        self.message = message
        self.field = field
        self.value = None if value is None else _short(str(value))
        self.limit = None if limit is None else str(limit)
        super().__init__(self.sentence({}))

    def sentence(self, names: Mapping[str, str]) -> str:
        """The message with the field's name in names, where a client knows the field by another."""
        if self.field is None:
            return self.message
        return f"{names.get(self.field) or _SPOKEN.get(self.field, self.field)} {self.message}"


class InvalidArgumentError(FaserError):
    """The caller sent something that can never work."""

    code = "INVALID_ARG"


class UnavailableError(FaserError):
    """The service cannot take the request now; trying again later may work."""

    code = "UNAVAILABLE"


def timed_out(where: str, timeout_ms: float | None) -> UnavailableError:
    """The end of a request that was given timeout_ms. where: "in the queue" or "while it ran"."""
    return UnavailableError(f"the request timed out {where}, timeout_ms is {timeout_ms:g}; try again later or raise it")


class OutOfMemoryError(FaserError):
    """Memory ran out, of the host or of a device."""


class CancelledError(FaserError):
    """The client cancelled the request."""

    code = "CANCELLED"


class EngineFileError(FaserError):
    """An engine directory or checkpoint is missing, truncated, or does not fit; run `faser build`."""

    code = "INVALID_ARG"


class CheckpointError(InvalidArgumentError):
    """A checkpoint cannot be read or is of an unsupported kind."""


class ConfigError(InvalidArgumentError):
    """A configuration file or flag is wrong."""


def install(extras: str) -> str:
    """How to install extras of this package, such as "serve,openai". The project is on no package index."""
    return f"pip install -c constraints.txt -e '.[{extras}]' in a checkout of faser_trtllm"


def reason_of(error: Exception) -> str:
    """The system's reason why a file could not be used, and who has no right to: "Permission denied, as uid 1000"."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    has_no_right = error.errno in (errno.EACCES, errno.EPERM)
    return f"{error.strerror}, as uid {os.geteuid()}" if has_no_right else error.strerror


def _short(value: str) -> str:
    return value if len(value) <= _MAX_VALUE_CHARS else f"{value[:_MAX_VALUE_CHARS]}..."
