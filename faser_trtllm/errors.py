"""The errors users see. Each message is one sentence: the field, the value, the limit and the fix."""

import os


class FaserError(Exception):
    """Base of all errors meant for users; `code` is the Triton status it maps to."""

    code = "INTERNAL"


class InvalidArgumentError(FaserError):
    """The caller sent something that can never work."""

    code = "INVALID_ARG"


class UnavailableError(FaserError):
    """The service cannot take the request now; trying again later may work."""

    code = "UNAVAILABLE"


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
    return f"pip install -c constraints.txt '.[{extras}]' in a checkout of faser_trtllm"


def reason_of(error: Exception) -> str:
    """The system's reason why a file could not be used, and the user: "Permission denied, as uid 1000"."""
    return f"{error.strerror}, as uid {os.geteuid()}" if isinstance(error, OSError) else str(error)
