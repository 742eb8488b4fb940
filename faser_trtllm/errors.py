"""The errors users see. Each message is one sentence: the field, the value, the limit and the fix."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

_MAX_VALUE_CHARS = 64
_SPOKEN = {"prompt": "the prompt", "prompt_tokens": "the prompt"}
"""How messages name fields that clients know under another name."""


class FaserError(Exception):
    """Base of all errors meant for users; `code` is the Triton status it maps to.

    field, value, limit: the field at fault, its value and the allowed range, as text; None if no field is at fault. A
    prompt that is too long for the engine has the field "prompt_tokens" and the engine's maximum as its limit.
    """

    code = "INTERNAL"

    def __init__(self, message: str, field: str | None = None, value: object = None, limit: object = None) -> None:
        """With a field, message continues a sentence that starts with its name: "is -1, allowed is 0 to 2"."""
        self.message = message
        self.field = field
        self.value = None if value is None else _short(str(value))
        self.limit = None if limit is None else str(limit)
        super().__init__(self.sentence({}))

    def sentence(self, names: Mapping[str, str]) -> str:
        """Return the message with the client's own name for the field, if names has one."""
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
    """Return the error of a request whose timeout_ms ended. where: "in the queue" or "while it ran"."""
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
    """Return the command that installs extras such as "serve,openai"; the project is on no package index."""
    return f"pip install -c constraints.txt -e '.[{extras}]' in a checkout of faser_trtllm"


def reason_of(error: Exception) -> str:
    """Return why a file could not be used, and the user id if permission is missing ("Permission denied, as uid 1")."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    has_no_right = error.errno in (errno.EACCES, errno.EPERM)
    return f"{error.strerror}, as uid {os.geteuid()}" if has_no_right else error.strerror


def _short(value: str) -> str:
    return value if len(value) <= _MAX_VALUE_CHARS else f"{value[:_MAX_VALUE_CHARS]}..."
