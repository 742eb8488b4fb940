"""Limits that the operator sets for clients: priority, timeout, cache salt, and which requests they may stop."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import Any

from faser_trtllm.config import ServiceConfig
from faser_trtllm.core.request_field import Bounds
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.client import CLIENT_HEADER
from faser_trtllm.serving.text.request import TextRequest

MAX_KEY_CHARS = 256
_DEFAULT_PRIORITY = 0.5  # of a request without one
_UUID4 = re.compile("[0-9a-f]{8}-?[0-9a-f]{4}-?4[0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}", re.IGNORECASE)
"""A version 4 UUID, which has 122 random bits (RFC 9562)."""


@dataclass(frozen=True, slots=True)
class ClientRules:
    """The settings of ServiceConfig that limit clients. A proxy names a request's client by its key, "" for none."""

    max_priority: float = _DEFAULT_PRIORITY
    default_timeout_ms: float = 0.0
    stop_by_id: bool = False
    salts_by_client: bool = False

    @staticmethod
    def of(config: ServiceConfig) -> ClientRules:
        return ClientRules(
            config.max_priority, config.default_timeout_ms, config.stop_by_id, config.cache_salt == "client"
        )

    def applied(self, request: TextRequest, client_key: str) -> TextRequest:
        """Return the request within its client's limits; raise InvalidArgumentError if the client may not send it."""
        if len(client_key) > MAX_KEY_CHARS:
            raise InvalidArgumentError(
                f"has {len(client_key)} characters, allowed are at most {MAX_KEY_CHARS}",
                CLIENT_HEADER,
                len(client_key),
                MAX_KEY_CHARS,
            )
        changes: dict[str, Any] = {"client_key": client_key} if client_key else {}
        if request.priority > self.max_priority:
            if request.priority != _DEFAULT_PRIORITY:
                limit = f"0 to {self.max_priority:g}, the server's max_priority"
                Bounds(0.0, self.max_priority, words=limit).check("priority", request.priority)
            changes["priority"] = self.max_priority
        if self.default_timeout_ms and request.timeout_ms is None and not request.stream:
            changes["timeout_ms"] = self.default_timeout_ms
        if self.salts_by_client:  # hashed, so that clients cannot share a salt
            salts = json.dumps([client_key, request.cache_salt, request.cache_salt_id])
            changes |= {"cache_salt": hashlib.sha256(salts.encode()).hexdigest(), "cache_salt_id": None}
        return replace(request, **changes) if changes else request

    def check_stop(self, request_id: str, client_key: str) -> None:
        """Raise InvalidArgumentError for an id that may not stop requests: it is missing, or others could guess it."""
        if not request_id:
            raise InvalidArgumentError("A request id must be provided for request cancellation")
        if not (self.stop_by_id or client_key or _UUID4.search(request_id)):
            raise InvalidArgumentError(
                f"the id {request_id[:64]!r} can be guessed, so it stops no request; use random (version 4) "
                "UUIDs, cancel the gRPC stream, or set stop_by_id in the server's configuration"
            )
