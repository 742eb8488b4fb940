"""The process of a rank that follows rank 0: `python -m` this module with the file descriptor of a socket.

It opens its part of the target and runs the calls that rank 0 sends, until the socket closes.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.engine.cuda.open import blocks_of, open_follower
from faser_trtllm.engine.cuda.parallel.leader import WRONG_USE
from faser_trtllm.engine.cuda.parallel.ranks import RankTask, layout_of
from faser_trtllm.engine.gpu.engine import GpuEngine
from faser_trtllm.errors import FaserError
from faser_trtllm.ops.prune_rows import PruneBatch
from faser_trtllm.partition.green_context import GpuPartition

ORPHAN_TIMEOUT_S = 5.0  # time for running work to end after rank 0 has exited


class Follower:
    """Runs the calls that LeadingEngine sends. Partitions come by name; None stands for the previous batch."""

    def __init__(self, engine: GpuEngine, partitions: Iterable[GpuPartition]) -> None:
        self._engine = engine
        self._partitions = {partition.name: partition for partition in partitions}
        self._batch: RaggedBatch | None = None

    def use(self, name: str) -> None:
        self._engine.use(self._partitions[name])

    def capture_graphs(self, names: Iterable[str]) -> None:
        self._engine.capture_graphs([self._partitions[name] for name in names])

    def run_segment(self, batch: RaggedBatch | None, segment: int) -> None:
        self._batch = self._batch if batch is None else batch
        assert self._batch is not None, "the first segment comes with its batch"
        self._engine.run_segment(self._batch, segment)

    def forward(self, batch: RaggedBatch) -> None:
        self._engine.forward(batch)

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        self._engine.compact_rows(rows)

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> None:
        self._engine.early_exit(rows, candidates)

    def prune(self, batch: PruneBatch) -> None:
        self._engine.prune(batch)


def run(connection: Connection, task: RankTask) -> None:
    """Open the rank's GPU, answer with its layout and KV blocks or an error, then run rank 0's calls."""
    with ExitStack() as stack:
        try:
            gpu = stack.enter_context(task.make_gpu())
            answer: object = (layout_of(gpu), blocks_of(task.request, gpu, task.shard))
        except FaserError as error:
            connection.send(str(error))
            return
        connection.send(answer)
        try:
            num_blocks = connection.recv()
        except EOFError:
            return
        request = replace(task.request, num_blocks=num_blocks)
        engine = open_follower(request, gpu, stack, task.shard, task.directory)
        follower = Follower(engine, (gpu.whole, gpu.pair.target))
        while True:
            try:
                name, arguments = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                getattr(follower, name)(*arguments)
            except WRONG_USE:
                continue  # rank 0 raises the same error


def _end_with_leader(connection: Connection) -> None:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLHUP | select.POLLRDHUP)
    poll.poll()
    time.sleep(ORPHAN_TIMEOUT_S)
    os._exit(0)  # the main thread may be in a collective that never ends


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C and ends the others
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with_leader, args=(connection,), daemon=True).start()
    run(connection, connection.recv())


if __name__ == "__main__":
    main()
