"""Accounts for every request: each has exactly one ending, and an unexpected ending is a failure."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from benchmarks.soak.jobs import BadInput, Plan

MAX_TOLD_FAILURES = 20


class Ending(str, Enum):
    FINISHED = "finished"  # with the expected text
    CANCELLED = "cancelled"  # by the client; the text so far was a prefix of the expected one
    LATE = "timed out"  # its deadline passed; the text so far was a prefix of the expected one
    REFUSED = "refused"  # bad input, with the expected message
    LOST = "lost to a kill"  # UNAVAILABLE while the engine child was down
    FAILED = "failed"  # anything else


@dataclass
class Answer:
    """One request as seen by its client; times are from time.monotonic().

    error: the server's sentence, None if the stream ended well.
    was_cancelled: the client ended it.
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
    """The signal is sent between killed_s and dead_s. recovered_s: first token of a request sent after that."""

    killed_s: float
    dead_s: float = math.inf
    recovered_s: float | None = None

    @property
    def recovery_s(self) -> float | None:
        return None if self.recovered_s is None else self.recovered_s - self.killed_s

    def concerns(self, answer: Answer) -> bool:
        """Whether the request was open at any time between the kill and the recovery."""
        return answer.ended_s >= self.killed_s and (self.recovered_s is None or answer.sent_s <= self.recovered_s)


def judge(plan: Plan, answer: Answer, was_down: bool) -> tuple[Ending, str]:
    """The ending, and the reason of a failure. was_down: the request overlapped a kill."""
    request = plan.request
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


def _is_beginning(answer: Answer, text: str) -> bool:
    """Whether the server ended the text early; a character that this cut ends in replacement characters."""
    return text.startswith(answer.text.rstrip("\ufffd"))


def is_loss(answer: Answer) -> bool:
    """The service's messages while its engine child is down."""
    return (answer.error or "").startswith(("the engine process stopped", "the engine process is starting again"))


def is_late(answer: Answer) -> bool:
    """A request past its deadline ends normally if it has tokens; without any it is an error."""
    return answer.finish_reason == "timeout" or "the request timed out" in (answer.error or "")


@dataclass
class Ledger:
    """Thread-safe counts. failures: a description of the first of each kind."""

    counts: Counter[tuple[str, str, Ending]] = field(default_factory=Counter)  # transport, kind, ending
    cancelled_early: int = 0  # of the cancelled ones: before the first token, in the queue or the prefill
    num_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    kills: list[Kill] = field(default_factory=list)
    usual_s: float = 0.5  # moving average over finished requests

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def kill(self, pid: int) -> None:
        """Kill the engine child."""
        kill = Kill(time.monotonic())
        with self._lock:
            self.kills.append(kill)
        os.kill(pid, signal.SIGKILL)
        kill.dead_s = time.monotonic()

    def first_token(self, answer: Answer) -> None:
        """A first token arrived: answer.first_s is set."""
        with self._lock:
            if self.kills and self.kills[-1].recovered_s is None and answer.sent_s > self.kills[-1].dead_s:
                self.kills[-1].recovered_s = answer.first_s

    def close(self, transport: str, plan: Plan, answer: Answer) -> Ending:
        """Classify and count a finished request."""
        with self._lock:
            ending, reason = judge(plan, answer, any(kill.concerns(answer) for kill in self.kills))
            self.counts[transport, plan.kind, ending] += 1
            self.num_tokens += answer.num_tokens
            if ending is Ending.FAILED and (reason in self.failures or len(self.failures) < MAX_TOLD_FAILURES):
                self.failures[reason] += 1
            elif ending is Ending.CANCELLED and answer.first_s is None:
                self.cancelled_early += 1
            elif ending is Ending.FINISHED:
                self.usual_s += 0.05 * (answer.ended_s - answer.sent_s - self.usual_s)
            return ending

    def summary(self) -> str:
        """One line."""
        endings = ", ".join(f"{self.total(ending)} {ending.value}" for ending in Ending)
        return f"{endings}, {self.num_tokens} tokens, {len(self.kills)} kills"

    def total(self, ending: Ending | None = None) -> int:
        return sum(count for (*_, found), count in self.counts.items() if ending is None or found is ending)
