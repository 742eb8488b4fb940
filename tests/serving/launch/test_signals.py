"""Tests of serving.launch.signals: which events a signal sets, and that no moment of the main thread is a wrong one."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from faser_trtllm.serving.launch.process import REPLACE_DRAFT
from faser_trtllm.serving.launch.signals import handle_signals, stop_on_signals
from tests.support.waiting import wait_until


def test_an_action_may_need_what_the_main_thread_holds():
    """Event.set() needs the lock of an Event.wait() that the signal interrupts."""
    lock, found = threading.Lock(), []

    def act() -> None:
        found.append(lock.acquire(timeout=5))
        lock.release()

    with handle_signals({signal.SIGUSR1: act}):
        with lock:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)  # the handler has run, in this thread
        wait_until(lambda: found)
    assert found == [True]


@pytest.fixture
def events():
    """Three events; SIGHUP has its usual handler, even if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield [threading.Event() for _ in range(3)]
    signal.signal(signal.SIGHUP, before)


def test_the_first_signal_stops_and_the_second_hurries(events):
    stop, hurry, draft_changed = events
    with stop_on_signals(stop, hurry, draft_changed):
        os.kill(os.getpid(), REPLACE_DRAFT)
        wait_until(draft_changed.is_set)
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(stop.is_set)
        assert not hurry.is_set()
        os.kill(os.getpid(), signal.SIGHUP)
        wait_until(hurry.is_set)


def test_a_hangup_is_ignored_under_nohup_and_handlers_come_back(events):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handlers = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, REPLACE_DRAFT)]
    with stop_on_signals(*events):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), REPLACE_DRAFT)
        wait_until(events[2].is_set)
    assert [event.is_set() for event in events] == [False, False, True]
    assert handlers == [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, REPLACE_DRAFT)]


def test_actions_run_in_order_on_one_thread_and_are_over_at_the_end():
    seen: list[tuple[str, str]] = []

    def note(name: str) -> None:
        seen.append((name, threading.current_thread().name))

    with handle_signals({signal.SIGUSR1: lambda: note("one"), signal.SIGUSR2: lambda: note("two")}):
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
            os.kill(os.getpid(), signum)
    assert seen == [(name, "faser-signals") for name in ("one", "two", "one")]
