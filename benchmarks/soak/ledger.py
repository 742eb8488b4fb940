"""An account of all requests: each has exactly one ending, and an unexpected ending is a failure."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from benchmarks.bystander.cases import Case
from benchmarks.soak.jobs import BadInput, Job, Plan
from benchmarks.soak.watch import ENGINE, SERVER

MAX_TOLD_FAILURES = 20
ENGINE_DOWN = ("the engine process stopped", "the engine process is starting again")
_SERVER_DOWN = (
    "Connection",
    "RemoteDisconnected",
    "IncompleteRead",
    "UNAVAILABLE",
    "Socket closed",
    "Internal error from Core",  # grpc.aio, if the connection is cut during a write
    "not ready",
    *ENGINE_DOWN,
    "the stream ended before its last response",
)
_FAULTS = ("could not be read", "INTERNAL", "DEADLINE_EXCEEDED", "UNKNOWN")
RECONNECT_S = 1.0  # time in which clients notice that a killed server is back


class Ending(str, Enum):
    FINISHED = "finished"  # with the expected text
    CANCELLED = "cancelled"  # by the client; the text so far was a prefix of the expected one
    LATE = "timed out"  # its deadline passed; the text so far was a prefix of the expected one
    REFUSED = "refused"  # bad input, with the expected message
    SERVED = "served"  # a hostile request, whatever its text
    LOST = "lost to a kill"  # UNAVAILABLE while the engine child or the server was down
    FAILED = "failed"  # anything else


@dataclass
class Answer:
    """One request as seen by its client; times are from time.monotonic().

    error: the server's message, None if the stream ended well. was_cancelled: the client ended it.
    """

    sent_s: float
    ended_s: float = 0.0
    first_s: float | None = None
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    was_cancelled: bool = False


@dataclass
class Kill:
    """A kill, whose signal is sent between killed_s and dead_s. recovered_s: first token of a request sent after it."""

    killed_s: float
    dead_s: float = math.inf
    recovered_s: float | None = None
    role: str = ENGINE

    @property
    def recovery_s(self) -> float | None:
        return None if self.recovered_s is None else self.recovered_s - self.killed_s

    def concerns(self, answer: Answer) -> bool:
        """Return True if the request was open at any time between the kill and the recovery."""
        if self.recovered_s is None or answer.ended_s < self.killed_s:
            return answer.ended_s >= self.killed_s
        return answer.sent_s <= self.recovered_s + (RECONNECT_S if self.role == SERVER else 0.0)


def judge(plan: Plan, answer: Answer, was_down: bool, was_server_down: bool = False) -> tuple[Ending, str]:
    """Return the ending, and a failure's reason. was_down: it overlapped a kill; was_server_down: of the server."""
    ending, reason = _judge(plan, answer, was_down)
    if ending is Ending.FAILED and was_server_down and _is_loss_of_server(plan.request, answer):
        return Ending.LOST, ""
    return ending, reason


def _judge(plan: Plan, answer: Answer, was_down: bool) -> tuple[Ending, str]:
    request = plan.request
    if isinstance(request, Case):
        return _judge_hostile(answer, was_down)
    if isinstance(request, BadInput):
        if answer.error is None:
            return Ending.FAILED, f"was served, but must be refused with {request.message!r}"
        if request.message in answer.error:
            return Ending.REFUSED, ""
    elif plan.has_deadline and is_late(answer):
        if _is_beginning(answer, request.text):
            return Ending.LATE, ""
        return Ending.FAILED, f"other text: {answer.text[-80:]!r}"
    elif answer.was_cancelled and answer.finish_reason == "cancelled" and _is_beginning(answer, request.text):
        return Ending.CANCELLED, ""
    elif not request.text.startswith(answer.text):
        return Ending.FAILED, f"other text: {answer.text[-80:]!r}"
    elif answer.was_cancelled:
        return Ending.CANCELLED, ""
    elif answer.error is None:
        if answer.finish_reason is None:
            return Ending.FAILED, "the stream ended without a last response"
        if (answer.text, answer.finish_reason) != (request.text, request.finish_reason):
            return Ending.FAILED, f"finished with {answer.finish_reason} and {len(answer.text)} characters of text"
        return Ending.FINISHED, ""
    if was_down and is_loss(answer):
        return Ending.LOST, ""
    return Ending.FAILED, str(answer.error)


def _judge_hostile(answer: Answer, was_down: bool) -> tuple[Ending, str]:
    """Judge a worst request, which must be served, or refused by a sentence of ours or of Triton.

    Its client may also give up first, since 64 long sequences take time on a busy machine.
    """
    error = answer.error
    if error is None:
        return (Ending.CANCELLED if answer.was_cancelled else Ending.SERVED), ""
    kind = error.partition(":")[0]
    if "the request timed out" in error or error.startswith("DEADLINE_EXCEEDED") or kind == "TimeoutError":
        return Ending.LATE, ""
    if is_loss(answer):
        return (Ending.LOST, "") if was_down else (Ending.FAILED, error)
    is_cut = " " not in kind and kind.endswith(("Error", "Disconnected", "IncompleteRead"))
    if is_cut or any(word in error for word in _FAULTS):
        return Ending.FAILED, f"hostile: {error[:200]}"
    return Ending.REFUSED, ""


def _is_loss_of_server(request: Job | BadInput | Case, answer: Answer) -> bool:
    """Return True if the connection was cut or refused after the beginning of the text."""
    if isinstance(request, Job) and not _is_beginning(answer, request.text):
        return False
    error = answer.error
    return (error is None and answer.finish_reason is None) or any(word in (error or "") for word in _SERVER_DOWN)


def _is_beginning(answer: Answer, text: str) -> bool:
    """Return True if the server ended the text early; a cut character becomes replacement characters."""
    return text.startswith(answer.text.rstrip("\ufffd"))


def is_loss(answer: Answer) -> bool:
    """Return True for a message of the service while its engine child is down."""
    return any(word in (answer.error or "") for word in ENGINE_DOWN)


def is_late(answer: Answer) -> bool:
    """Return True for a request past its deadline, which ends normally with tokens, and else with an error."""
    return answer.finish_reason == "timeout" or "the request timed out" in (answer.error or "")


@dataclass
class Ledger:
    """Thread-safe counts of requests. failures: counts by description."""

    counts: Counter[tuple[str, str, Ending]] = field(default_factory=Counter)  # by transport, kind, ending
    cancelled_early: int = 0  # cancelled before the first token, in the queue or the prefill
    num_tokens: int = 0
    num_hostile: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    kills: list[Kill] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)  # from, to
    usual_s: float = 0.5  # moving average over finished requests

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def kill(self, pid: int, role: str = ENGINE) -> None:
        """Kill the engine child, or the process of another role."""
        kill = Kill(time.monotonic(), role=role)
        with self._lock:
            self.kills.append(kill)
        os.kill(pid, signal.SIGKILL)
        kill.dead_s = time.monotonic()

    def has_recovered(self) -> bool:
        """Return True if the service has recovered from the last kill, or has not been killed."""
        with self._lock:
            return not self.kills or self.kills[-1].recovered_s is not None

    def share_of_hostile(self) -> float:
        """Return the share of hostile requests among those that have ended."""
        with self._lock:
            return self.num_hostile / max(1, sum(self.counts.values()))

    def first_token(self, answer: Answer) -> None:
        """Record a first token, whose time is answer.first_s."""
        with self._lock:
            if self.kills and self.kills[-1].recovered_s is None and answer.sent_s > self.kills[-1].dead_s:
                self.kills[-1].recovered_s = answer.first_s

    def close(self, transport: str, plan: Plan, answer: Answer) -> Ending:
        """Classify and count a finished request."""
        with self._lock:
            roles = {kill.role for kill in self.kills if kill.concerns(answer)}
            ending, reason = judge(plan, answer, bool(roles), SERVER in roles)
            self.counts[transport, plan.kind, ending] += 1
            self.num_hostile += plan.is_hostile
            self.num_tokens += answer.num_tokens
            if ending is Ending.FAILED and (reason in self.failures or len(self.failures) < MAX_TOLD_FAILURES):
                self.failures[reason] += 1
            elif ending is Ending.CANCELLED and answer.first_s is None:
                self.cancelled_early += 1
            elif ending is Ending.FINISHED:
                self.usual_s += 0.05 * (answer.ended_s - answer.sent_s - self.usual_s)
            return ending

    def summary(self) -> str:
        """Return one line about the counts."""
        endings = ", ".join(f"{self.total(ending)} {ending.value}" for ending in Ending)
        return f"{endings}, {self.num_tokens} tokens, {len(self.kills)} kills"

    def total(self, ending: Ending | None = None) -> int:
        return sum(count for (*_, found), count in self.counts.items() if ending is None or found is ending)
