"""A Ctrl-C that somebody swallows is not lost."""

import contextlib
import os
import signal
import threading

import pytest

from faser_trtllm.builder.interrupts import kept_interrupts, raise_kept


def swallowed_ctrl_c():
    """Raise a Ctrl-C and drop it, as a callback of native code drops what is raised in it."""
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass


def interrupted_on_the_way(reached):
    with kept_interrupts():
        swallowed_ctrl_c()
        reached.append("swallowed")
        raise_kept()
        reached.append("asked")


def test_it_is_raised_when_asked_and_at_the_end():
    previous = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), kept_interrupts():
        swallowed_ctrl_c()
    reached = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_on_the_way(reached)
    assert reached == ["swallowed"]
    assert signal.getsignal(signal.SIGINT) is previous


def test_without_one_nothing_is_raised_and_the_next_block_starts_clean():
    with pytest.raises(KeyboardInterrupt), kept_interrupts():
        swallowed_ctrl_c()
    with kept_interrupts():
        raise_kept()


def test_another_thread_has_no_signals():
    ended = []

    def run():
        with kept_interrupts():
            ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended
