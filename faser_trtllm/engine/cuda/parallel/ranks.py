"""Start the processes of the ranks after rank 0, send them rank 0's calls, and watch them.

If a rank ends unexpectedly, all are ended, since the others would wait for it in the next collective.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from faser_trtllm.builder.shard import Shard
from faser_trtllm.core.closing import Closing
from faser_trtllm.engine.cuda.parallel.group import RankGroup
from faser_trtllm.engine.gpu.device import Gpu
from faser_trtllm.engine.opening import OpenRequest
from faser_trtllm.errors import ConfigError, FaserError

CLOSE_TIMEOUT_S = 10.0  # a rank that has not ended after this long is killed
NOTICE_TIMEOUT_S = 1.0  # wait this long after a failed collective for the news that a rank has ended
PROGRAM = "faser_trtllm.engine.cuda.follower"

Layout = tuple[tuple[str, int], ...]
"""The partitions that the target runs on, with their SMs: the same on all ranks."""
Answer = tuple[Layout, int] | str
"""A rank's answer once it has opened its GPU: its layout and the KV blocks it has room for, or an error message."""


@dataclass(frozen=True, slots=True)
class RankTask:
    """The arguments that a rank is started with. directory: where the ranks meet."""

    shard: Shard
    request: OpenRequest
    make_gpu: Callable[[], AbstractContextManager[Gpu]]
    directory: Path


class Ranks(Closing):
    """The ranks 1 to tp_size - 1, as rank 0 sees them. Use a `with` block."""

    def __init__(self, request: OpenRequest, gpu: Gpu) -> None:
        """Start the ranks and wait until each has opened its GPU. self.num_blocks is then the smallest number of KV
        blocks that a rank has room for. Raises ConfigError for a rank's error, or if GPUs differ."""
        self._size = request.engines.tp_size
        self._directory = tempfile.TemporaryDirectory(prefix="faser-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._death: str | None = None
        self._is_dead, self._is_closing = threading.Event(), False
        request = replace(request, core_set=None, drafting=False)
        try:
            for rank in range(1, self._size):
                make_gpu, environment = gpu.of_rank(rank)
                self._start(RankTask(Shard(rank, self._size), request, make_gpu, self.directory), environment)
            found = [self._check(rank, connection, layout_of(gpu)) for rank, connection in self._by_rank()]
            self.num_blocks = min(found)
            for rank, process in enumerate(self._processes, 1):
                threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()
        except BaseException:
            self.close()
            raise

    @property
    def directory(self) -> Path:
        return Path(self._directory.name)

    def tell(self, name: str, *arguments: object) -> None:
        """Send a call of rank 0's engine to every other rank; raise FaserError if one has ended."""
        if self._death is not None:
            raise FaserError(self._death)
        message = pickle.dumps((name, arguments), pickle.HIGHEST_PROTOCOL)
        for connection in self._connections:
            try:
                connection.send_bytes(message)
            except OSError as error:
                raise self.cause_of(error) from error

    def cause_of(self, error: Exception) -> Exception:
        """Return FaserError if a rank has ended, which is then the cause, else the error; waits NOTICE_TIMEOUT_S."""
        self._is_dead.wait(NOTICE_TIMEOUT_S)
        return error if self._death is None else FaserError(self._death)

    def close(self) -> None:
        """End the ranks and wait for them."""
        self._is_closing = True
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._directory.cleanup()

    def open(self, num_blocks: int) -> None:
        """Have the ranks open their parts of the target, with this many KV blocks."""
        for connection in self._connections:
            connection.send(num_blocks)

    def _by_rank(self) -> Iterable[tuple[int, Connection]]:
        return enumerate(self._connections, 1)

    def _start(self, task: RankTask, environment: Mapping[str, str]) -> None:
        ours, theirs = Pipe()
        self._connections.append(ours)
        with theirs:
            command = [sys.executable, "-m", PROGRAM, str(theirs.fileno())]
            paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            whole = {**os.environ, **paths, **environment}
            self._processes.append(subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=whole))
        ours.send(task)

    def _check(self, rank: int, connection: Connection, layout: Layout) -> int:
        try:
            answer: Answer = connection.recv()
        except (EOFError, OSError) as error:
            raise ConfigError(f"rank {rank} ended while it opened its GPU; its error is in the log above") from error
        if isinstance(answer, str):
            raise ConfigError(f"rank {rank}: {answer}")
        found, num_blocks = answer
        if found != layout:
            raise ConfigError(
                f"rank {rank} was granted the partitions {_shown(found)}, rank 0 {_shown(layout)}; tensor parallelism "
                "needs equal GPUs"
            )
        return num_blocks

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._is_closing or self._is_dead.is_set():
            return
        for other, ended in enumerate((process.poll() for process in self._processes), 1):
            if ended is not None and ended < 0 <= code:  # a killed rank is the reason that this one failed
                rank, code = other, ended
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        self._death = (
            f"rank {rank} of {self._size} {how}, and the others cannot go on without it; start the engine again"
        )
        self._is_dead.set()
        for process in self._processes:
            process.kill()
        raise FaserError(self._death)  # for threading.excepthook: a server's ends the process, which is then restarted


@dataclass(frozen=True, slots=True)
class Membership:
    """An engine's place among the ranks. ranks: the other ranks, on rank 0 only."""

    group: RankGroup
    ranks: Ranks | None = None


def layout_of(gpu: Gpu) -> Layout:
    return tuple((part.name, part.num_sms) for part in (gpu.whole, gpu.pair.target))


def _shown(layout: Layout) -> str:
    return ", ".join(f"{name} of {num_sms} SMs" for name, num_sms in layout)
