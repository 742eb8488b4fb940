"""Test-compiles grammars in a separate process, where they may run out of time, memory or stack.

A grammar that passes is compiled again in the engine process; one that takes too long or crashes the library ends only
this process. The first mask is computed too, because with very many alternatives it takes the longest.
Frames on stdin and stdout: length of the body (4 bytes, little endian), then JSON. The first request describes the
tokenizer, each further one a guide; each gets one answer.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import subprocess
import sys
from typing import IO, Any

from faser_trtllm.errors import FaserError, InvalidArgumentError
from faser_trtllm.guided.grammar import compile_source, first_token_error, open_tokenizer, shortened, source_of
from faser_trtllm.guided.spec import GUIDE_FIELD, GuideSpec

MAX_MEMORY_BYTES = 2 << 30
_LENGTH = struct.Struct("<I")


class Probe:
    """The process behind check(); started on demand and restarted after it died. One caller at a time."""

    def __init__(self, definition: str, vocab_size: int, eos_token_ids: tuple[int, ...], timeout_s: float) -> None:
        self._tokenizer = {"definition": definition, "vocab_size": vocab_size, "eos_token_ids": eos_token_ids}
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, spec: GuideSpec) -> str:
        """The guide in llguidance's format; raises InvalidArgumentError if it is invalid or takes too long."""
        answer = self._ask({"guide_type": spec.guide_type, "guide": spec.guide})
        if answer is None:
            raise InvalidArgumentError(
                f"takes more than {self._timeout_s:g} s or {MAX_MEMORY_BYTES >> 30} GiB to compile; simplify it",
                GUIDE_FIELD,
                limit=f"{self._timeout_s:g} s",
            )
        if answer["error"]:
            raise InvalidArgumentError(f"is not a valid {spec.guide_type}: {answer['error']}", GUIDE_FIELD)
        source: str = answer["source"]
        return source

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        if self._process is None:
            self._process = self._start()
        answer = _exchange(self._process, question)
        if answer is None:
            self.close()
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-m", "faser_trtllm.guided.probe", str(self._timeout_s))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        answer = _exchange(process, self._tokenizer)
        if answer is None or answer["error"]:
            process.kill()
            process.communicate()
            reason = answer["error"] if answer else "the process that compiles grammars ended at once"
            raise FaserError(f"guided decoding cannot start: {reason}")
        return process


def _exchange(process: subprocess.Popen[bytes], question: dict[str, Any]) -> dict[str, Any] | None:
    """The answer; None if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _write(process.stdin, question)
        return _read(process.stdout)
    except (EOFError, OSError):
        return None


def _write(stream: IO[bytes], value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def _read(stream: IO[bytes]) -> dict[str, Any]:
    """Raises EOFError at the stream's end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    value: dict[str, Any] = json.loads(stream.read(*_LENGTH.unpack(head)))
    return value


def main() -> None:
    """Answer requests until stdin ends. The alarm's default action kills the process in any state."""
    timeout_s = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = open_tokenizer(**_read(source))
    _write(sink, {"error": ""})
    while True:
        try:
            spec = GuideSpec(**_read(source))
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        _write(sink, _answer(tokenizer, spec))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(tokenizer: Any, spec: GuideSpec) -> dict[str, str]:
    try:
        source = source_of(spec)
        matcher, error = compile_source(tokenizer, source)
        if not error and (reason := first_token_error(matcher)):
            error = f"its first token cannot be found ({reason})"
    except RecursionError:
        return {"source": "", "error": "it is nested too deeply"}
    except Exception as error:
        return {"source": "", "error": shortened(str(error))}
    return {"source": source, "error": error}


if __name__ == "__main__":
    main()
