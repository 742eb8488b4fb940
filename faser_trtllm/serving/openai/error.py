"""Errors as OpenAI's clients expect them: an HTTP status and a JSON object with message, type, param and code."""

from __future__ import annotations

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
_TYPES = {429: "rate_limit_error", 499: "cancelled", 503: "service_unavailable", 504: "timeout"}


class RequestError(InvalidArgumentError):
    """A refused request.

    field: the field at fault, such as "messages[0].role". param: the field that the client is told, by default the part
    before the index, such as "messages". reason: OpenAI's error code, if it has one.
    """

    def __init__(
        self,
        message: str,
        field: str | None = None,
        *,
        value: object = None,
        limit: object = None,
        param: str | None = None,
        status: int = 400,
        reason: str | None = None,
    ) -> None:
        super().__init__(message, field=field, value=value, limit=limit)
        self.param = param or (None if field is None else field.partition("[")[0])
        self.status = status
        self.reason = reason


def status_of(error: FaserError) -> int:
    """Return the HTTP status of an error; 500 by default."""
    return error.status if isinstance(error, RequestError) else _STATUS.get(error.code, 500)


def error_object(error: FaserError) -> dict[str, Any]:
    """Return the body {"error": {...}} of an error."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param, reason = error.field if status == 400 else None, None
    if isinstance(error, RequestError):
        param, reason = error.param, error.reason
    return {"error": {"message": str(error), "type": kind, "param": param, "code": reason}}
