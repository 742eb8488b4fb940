"""Streams, events, host functions and graphs of the virtual GPU, through cuda-python's bindings."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faser_trtllm
from faser_trtllm.errors import FaserError
from faser_trtllm.ops.cuda.driver import call_driver, load_driver
from tests.virtual_gpu.device.library import driver

_PACKAGE = str(Path(faser_trtllm.__file__).parent) + "/"
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_BLOCKING = 1  # CU_EVENT_BLOCKING_SYNC


class _Thread(threading.local):
    """The state that torch.cuda keeps per thread: the current stream. captured: functions of the graph being captured;
    pool: its memory."""

    stream = 0
    captured: list[int] | None = None
    pool: Any = None


_thread = _Thread()
_functions: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)
_errors: list[BaseException] = []


def call(name: str, *arguments: Any) -> Any:
    """A driver call's result; FaserError, caused by what a host function raised if one did."""
    bindings = load_driver()
    try:
        return call_driver(bindings, getattr(bindings, name), *arguments)
    except FaserError as error:
        raise error from (_errors[0] if _errors else None)


def current_stream() -> int:
    return _thread.stream


@contextlib.contextmanager
def on_stream(stream: int) -> Iterator[None]:
    before, _thread.stream = _thread.stream, stream
    try:
        yield
    finally:
        _thread.stream = before


def is_capturing() -> bool:
    return _thread.captured is not None


def current_pool() -> Any:
    return _thread.pool


def enqueue(function: Callable[[], None], label: str, stream: int | None = None) -> None:
    """Run a function of the host in stream order, or make it a node of the graph being captured."""
    number = next(_numbers)
    captured = _thread.captured
    if captured is None:
        _functions[number] = lambda: _once(number, function)
    else:
        _functions[number] = function
        captured.append(number)
    if status := driver().run(current_stream() if stream is None else stream, _TRAMPOLINE, number, label):
        raise FaserError(f"{label} cannot be queued, status {status}") from (_errors[0] if _errors else None)


def label_by_caller(what: str, behind: str = "") -> None:
    """Name this thread's next copy or wait by the function of the package that asks for it, or that asks a module
    named `behind`."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE) and not (behind and path.endswith(behind)):
            break
        frame = frame.f_back
    place = frame.f_code.co_filename.removeprefix(_PACKAGE).removesuffix(".py")
    driver().label(f"{what} {place}:{frame.f_code.co_name}")


def _once(number: int, function: Callable[[], None]) -> None:
    del _functions[number]
    function()


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _run(number: int) -> None:
    try:
        _functions[number]()
    except BaseException as error:
        _errors.append(error)
        driver().fail()


_TRAMPOLINE = ctypes.cast(_run, ctypes.c_void_p)


class Event:
    def __init__(self) -> None:
        self.handle = call("cuEventCreate", _BLOCKING)

    def record(self) -> Event:
        call("cuEventRecord", self.handle, current_stream())
        return self

    def synchronize(self) -> None:
        label_by_caller("wait")
        call("cuEventSynchronize", self.handle)

    def ms_until(self, end: Event) -> float:
        return float(call("cuEventElapsedTime", self.handle, end.handle))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            call("cuEventDestroy", self.handle)


class Graph:
    """A graph of what `work` enqueues on the current stream, like torch.cuda.CUDAGraph: with keep_graph it is not
    instantiated. pool: a GraphPool, without which `work` may not allocate."""

    def __init__(self, work: Callable[[], None], keep_graph: bool = False, pool: Any = None) -> None:
        stream = current_stream()
        self._pool = pool
        self._functions: list[int] = []
        self._graph = self._instance = None
        call("cuStreamBeginCapture", stream, load_driver().CUstreamCaptureMode(_THREAD_LOCAL))
        _thread.captured, _thread.pool = self._functions, pool
        try:
            work()
        finally:
            _thread.captured = _thread.pool = None
            self._graph = call("cuStreamEndCapture", stream)
        if not keep_graph:
            self._instance = call("cuGraphInstantiate", self._graph, 0)

    def raw_cuda_graph(self) -> int:
        return int(self._graph)

    def replay(self) -> None:
        """On the stream that is current."""
        call("cuGraphLaunch", self._instance, current_stream())

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if self._instance is not None:
                call("cuGraphExecDestroy", self._instance)
            if self._graph is not None:
                call("cuGraphDestroy", self._graph)
            for number in self._functions:
                _functions.pop(number, None)
