"""Core sets: what they refuse, and that their threads come and go."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from faser_trtllm import native
from faser_trtllm.errors import ConfigError
from faser_trtllm.partition.core_set import CoreSet
from tests.support.waiting import wait_until


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_default_takes_all_allowed_cores() -> None:
    with CoreSet() as core_set:
        assert core_set.cores == tuple(sorted(os.sched_getaffinity(0)))
        assert core_set.num_threads == len(core_set.cores)


def test_wrong_cores_are_refused() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match="none twice"):
        CoreSet([allowed[0], allowed[0]])
    with pytest.raises(ConfigError, match="at least one"):
        CoreSet([])
    with pytest.raises(ConfigError, match="cores holds 4095, this process may use"):
        CoreSet([allowed[0], 4095])
    with pytest.raises(ConfigError, match="num_threads is 0, allowed is 1 to"):
        CoreSet(num_threads=0)
    with pytest.raises(ConfigError, match="one per core"):
        CoreSet([allowed[0]], num_threads=2)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_threads_end_with_their_core_set() -> None:
    lib = native.library()
    before = _num_threads()
    for _ in range(20):
        pools = [lib.faser_pool_create(None, size, 50) for size in (1, 2, 4)]
        assert _num_threads() == before + 4
        for pool in pools:
            lib.faser_pool_destroy(pool)
        wait_until(lambda: _num_threads() == before)  # /proc shows a thread for a moment after it was joined


def test_closing_twice_is_harmless_and_use_after_is_not() -> None:
    core_set = CoreSet()
    core_set.close()
    core_set.close()
    with pytest.raises(ValueError, match="closed"):
        _ = core_set.handle


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs thread affinity")
def test_pin_caller_moves_only_the_calling_thread() -> None:
    core = sorted(os.sched_getaffinity(0))[0]
    pinned: list[set[int]] = []

    def pin() -> None:
        with CoreSet([core]) as core_set:
            core_set.pin_caller()
            pinned.append(os.sched_getaffinity(0))

    before = os.sched_getaffinity(0)
    thread = threading.Thread(target=pin)
    thread.start()
    thread.join()
    assert pinned == [{core}]
    assert os.sched_getaffinity(0) == before


def test_a_close_that_a_signal_interrupts_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    core_set, library = CoreSet(num_threads=1), native.library()
    destroyed: list[int] = []

    def destroy(handle: int) -> None:
        destroyed.append(handle)
        library.faser_pool_destroy(handle)
        raise KeyboardInterrupt

    monkeypatch.setattr(native, "library", lambda: SimpleNamespace(faser_pool_destroy=destroy))
    with pytest.raises(KeyboardInterrupt):
        core_set.close()
    core_set.close()
    assert len(destroyed) == 1
