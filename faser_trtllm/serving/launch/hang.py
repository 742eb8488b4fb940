"""Asks a server over HTTP, and notices one that runs but answers nobody."""

from __future__ import annotations

import http.client
import time

PERIOD_S = 1.0  # between two questions
TIMEOUT_S = 1.0  # of a question
LEAST_S = 6.0  # of silence that is a hang: several questions, since a busy machine may be late with one


class HangWatch:
    """Measures how long a server has been silent, over the time in which this process ran.

    A pause of the machine stops the server as well, so the time since the last question counts for PERIOD_S + TIMEOUT_S
    at most.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._asked_s = time.monotonic()
        self._silent_s = 0.0

    def silent_s(self) -> float:
        """Seconds without an answer; asks, which takes up to TIMEOUT_S, if the last question is PERIOD_S old."""
        if time.monotonic() - self._asked_s >= PERIOD_S:
            answered = status_of(self._host, self._port, "/v2/health/live", TIMEOUT_S) is not None
            now_s = time.monotonic()
            self._silent_s = 0.0 if answered else self._silent_s + min(now_s - self._asked_s, PERIOD_S + TIMEOUT_S)
            self._asked_s = now_s
        return self._silent_s


def status_of(host: str, port: int, path: str, timeout_s: float) -> int | None:
    """The status that a server answers a GET with, None if it does not. Proxies of the environment are not used."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
