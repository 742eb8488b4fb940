"""Errors as OpenAI's clients expect them: an HTTP status and a JSON object with message, type, param and code."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from faser_trtllm.errors import FaserError, InvalidArgumentError

_STATUS = {
    "INVALID_ARG": 400,
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "UNAVAILABLE": 503,
    "RESOURCE_EXHAUSTED": 429,
    "DEADLINE_EXCEEDED": 504,
    "CANCELLED": 499,
}
_FIRST_NAME = re.compile(r"(?:this model's maximum context length is \d+ tokens: )?(?:the (?=prompt))?(\w+)")
"""What a sentence of the model is about."""

_TYPES = {429: "rate_limit_error", 499: "cancelled", 503: "service_unavailable", 504: "timeout"}


class RequestError(InvalidArgumentError):
    """A refused request. param: the field at fault. reason: OpenAI's error code, if it has one."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, reason: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.reason = reason


class ModelError(FaserError):
    """The Triton model refused the request or failed. code: Triton's status. reason: OpenAI's error code, if any.
    param: the field at fault, if it is known."""

    def __init__(self, message: str, code: str, reason: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.param = param


def named(error: ModelError, fields: Collection[str], *, guide_field: str | None, is_chat: bool) -> ModelError:
    """The model's error with the names of a request's fields. guide_field: the one that constrains the output."""
    message = str(error)
    found = _FIRST_NAME.match(message)
    if found is None or status_of(error) != 400:
        return error
    name: str | None = found[1]
    if name == "guided_decoding_guide" and guide_field is not None:
        name = guide_field
        message = f"{name}{message[found.end() :]}"
    elif name == "prompt" and is_chat:
        name = "messages"
    elif name not in fields:
        name = None
    return ModelError(message, error.code, error.reason, name)


def status_of(error: FaserError) -> int:
    """The HTTP status of an error; 500 by default."""
    if isinstance(error, RequestError):
        return error.status
    return _STATUS.get(error.code, 500)


def error_object(error: FaserError) -> dict[str, Any]:
    """The body {"error": {...}} of an error."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param, reason = (error.param, error.reason) if isinstance(error, RequestError | ModelError) else (None, None)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": reason}}
