"""Sends HTTP requests to a server, and detects one that runs but does not answer."""

from __future__ import annotations

import http.client
import time

PERIOD_S = 1.0  # between two requests
TIMEOUT_S = 1.0  # for each request
LEAST_S = 6.0  # shortest time without an answer that counts as a hang; several requests, since a machine may be busy


class HangWatch:
    """Measures how long a server has not answered, without pauses of the machine.

    Such a pause also stops the server, so the time since the last request counts as PERIOD_S + TIMEOUT_S at most.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._asked_s = time.monotonic()
        self._silent_s = 0.0

    def silent_s(self) -> float:
        """Return the seconds without an answer. Send a request first if the last one is PERIOD_S old."""
        if time.monotonic() - self._asked_s >= PERIOD_S:
            answered = status_of(self._host, self._port, "/v2/health/live", TIMEOUT_S) is not None
            now_s = time.monotonic()
            self._silent_s = 0.0 if answered else self._silent_s + min(now_s - self._asked_s, PERIOD_S + TIMEOUT_S)
            self._asked_s = now_s
        return self._silent_s


def status_of(host: str, port: int, path: str, timeout_s: float) -> int | None:
    """Return the HTTP status of a GET, or None without an answer. The environment's proxies are not used."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
