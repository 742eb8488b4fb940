"""Sections that behave badly, for the tests of the suite's runner."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.skipped import Skipped
from faser_trtllm.errors import ConfigError


def fine(bench: Bench) -> None:
    bench.record.value("device", "a device")
    bench.record.table("Numbers", ("a", "b"), [(1, 2.5), (None, "x|y")], "A note.")
    bench.record.plot("Curve", "x", "y", {"line": {1.0: 2.0, 2.0: 4.0}})


def tells_its_time(bench: Bench) -> None:
    bench.record.value("left_s", bench.left_s)


def one_measurement_fails(bench: Bench) -> None:
    bench.record.attempt("division", lambda: 1 / 0)
    bench.record.value("after", 1)


def raises(bench: Bench) -> None:
    bench.record.value("before", 1)
    raise RuntimeError("broken")


def refuses(bench: Bench) -> None:
    raise ConfigError("a thing is missing; install it")


def skips(bench: Bench) -> None:
    raise Skipped("a tool is not installed")


def crashes(bench: Bench) -> None:
    bench.record.value("before", 1)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(bench: Bench) -> None:
    bench.record.value("before", 1)
    time.sleep(600)


def reads_what_was_before(bench: Bench) -> None:
    bench.record.value("seen", bench.found_before("fine", "device"))
