"""Try to compile guides under limits of time and memory, in processes that can be ended.

llguidance cannot be interrupted, its limits do not bound the time of a compilation, and a deep grammar overflows its
stack. So a server process opens the tokenizer once and forks a child for each guide. A guide that takes too much time
or memory, or crashes, ends only its child. A guide that passes is compiled again in the engine process, at a known
cost. The child also computes the first mask, which is the slowest one for guides with very many alternatives.

The server's standard input is a socket, from which it reads the tokenizer, then a descriptor for each guide: the
child's own socket, for one question and one answer. Frames: length of the body (4 bytes, little endian), then JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from faser_trtllm.errors import FaserError, InvalidArgumentError
from faser_trtllm.guided.grammar import compile_source, first_token_error, open_tokenizer, shortened, source_of
from faser_trtllm.guided.spec import GUIDE_FIELD, GuideSpec

MAX_MEMORY_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, eq=False)
class Probed:
    """A guide that compiles within the limits."""

    source: str  # in llguidance's format
    num_bytes: int  # memory of the compiled guide with its first mask


class Probe:
    """The processes that compile guides, started on demand and again after a crash. Thread-safe."""

    def __init__(self, definition: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = {"definition": definition, "vocab_size": vocab_size, "eos_token_ids": eos_token_ids}
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def check(self, spec: GuideSpec, budget_s: float, niceness: int = 0) -> Probed | None:
        """Compile a guide in a child; return None if it takes more than budget_s or MAX_MEMORY_BYTES, or crashes.

        budget_s: CPU time, so that other load does not matter. niceness: increment for os.nice().
        Raises InvalidArgumentError if the guide is invalid, FaserError if the server cannot start.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            asked = {"guide_type": spec.guide_type, "guide": spec.guide}
            try:
                _write(ours, {"spec": asked, "budget_s": budget_s, "niceness": niceness})
                answer = _read(ours)
            except (EOFError, OSError):
                return None
        if answer["error"]:
            raise InvalidArgumentError(f"is not a valid {spec.guide_type}: {answer['error']}", GUIDE_FIELD)
        return Probed(answer["source"], answer["num_bytes"])

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._server is not None and self._control is not None:
            self._control.close()
            self._server.kill()
            self._server.wait()
            self._server = self._control = None

    def _hand_over(self, connection: socket.socket) -> None:
        """Send the server a child's end of a connection; start the server if it does not run."""
        with self._lock:
            if self._server is not None and self._server.poll() is not None:
                self._close()
            if self._control is None:
                self._start()
            assert self._control is not None
            try:
                socket.send_fds(self._control, [b"?"], [connection.fileno()])
            except OSError:  # the server just ended; the next guide starts it again
                self._close()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                (sys.executable, "-m", "faser_trtllm.guided.probe"),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ
                | {"OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},  # threads do not survive forks
            )
        try:
            _write(self._control, self._tokenizer)
            reason = _read(self._control)["error"]
        except (EOFError, OSError):
            reason = "the process that compiles grammars ended at once"
        if reason:
            self._close()
            raise FaserError(f"guided decoding cannot start: {reason}")


def _write(connection: socket.socket, value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    connection.sendall(_LENGTH.pack(len(body)) + body)


def _read(connection: socket.socket) -> dict[str, Any]:
    """Read one frame. Raises EOFError at the end of the stream."""
    (length,) = _LENGTH.unpack(_read_bytes(connection, _LENGTH.size))
    value: dict[str, Any] = json.loads(_read_bytes(connection, length))
    return value


def _read_bytes(connection: socket.socket, length: int) -> bytes:
    data = connection.recv(length, socket.MSG_WAITALL)
    if len(data) < length:
        raise EOFError
    return data


def main() -> None:
    """Serve until the engine process closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=os.dup(0))
    tokenizer = open_tokenizer(**_read(control))
    _write(control, {"error": ""})
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            try:
                is_child = os.fork() == 0
            except OSError:
                continue  # no process or memory is left, so the guide counts as too large
            if is_child:
                _try(tokenizer, connection)


def _try(tokenizer: Any, connection: socket.socket) -> NoReturn:
    """Answer one question, then exit. When the time is over, SIGPROF ends the process in any state."""
    try:
        question = _read(connection)
        os.nice(question["niceness"])
        signal.setitimer(signal.ITIMER_PROF, question["budget_s"])
        size, held = _memory_bytes()
        resource.setrlimit(resource.RLIMIT_AS, (size + MAX_MEMORY_BYTES, size + MAX_MEMORY_BYTES))
        _write(connection, _answer(tokenizer, GuideSpec(**question["spec"]), held))
    finally:
        os._exit(0)


def _memory_bytes() -> tuple[int, int]:
    """Return this process's address space and private memory, both in bytes."""
    size, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return size * resource.getpagesize(), (resident - shared) * resource.getpagesize()


def _answer(tokenizer: Any, spec: GuideSpec, held: int) -> dict[str, Any]:
    """Compile the guide, compute its first mask and return the answer. held: private bytes of the process before."""
    try:
        source = source_of(spec)
        matcher, error = compile_source(tokenizer, source)
        if not error and (reason := first_token_error(matcher)):
            error = f"its first token cannot be found ({reason})"
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:
        return {"error": shortened(str(error))}
    return {"error": error, "source": source, "num_bytes": max(0, _memory_bytes()[1] - held)}


if __name__ == "__main__":
    main()
