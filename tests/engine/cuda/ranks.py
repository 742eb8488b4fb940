"""GPUs of ranks that run on the host, for processes of their own to import."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.engine.cuda.open import open_cuda_engines
from faser_trtllm.engine.opening import OpenedEngines, OpenRequest
from faser_trtllm.errors import ConfigError
from faser_trtllm.partition.green_context import GpuPartition, PartitionPair
from tests.engine.cuda.host_executor import HostGpu
from tests.support.waiting import wait_until

LIMITS = BuildConfig(max_batch_size=4, max_num_tokens=64, max_seq_len=128, max_draft_len=15, tokens_per_block=32)


class BrokenGpu(HostGpu):
    def __init__(self) -> None:
        raise ConfigError("the driver is too old")


class SmallerGpu(HostGpu):
    pair = PartitionPair(GpuPartition("draft", 2, 32), GpuPartition("target", 3, 68))


class FullGpu(HostGpu):
    num_free_bytes = 1_000


class ScarceGpu(HostGpu):
    num_free_bytes = 4_000_000


class BesideGpu(HostGpu):
    """A good one, whose other ranks have another kind."""

    def __init__(self, others: type[HostGpu]) -> None:
        self._others = others

    def of_rank(self, rank: int):
        return self._others, {"OMP_NUM_THREADS": "1"}


def open_target(engines: EngineDir, stack: ExitStack, gpu: HostGpu | None = None, **options) -> OpenedEngines:
    request = OpenRequest(engines, LIMITS, **({"num_blocks": 16, "drafting": False} | options))
    return open_cuda_engines(request, gpu or HostGpu(), stack)


def rank_pids(leader: int) -> list[int]:
    """The processes of the ranks behind a leader, by rank."""
    tasks = Path(f"/proc/{leader}/task")
    pids = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    return [pid for pid in sorted(pids) if b"cuda.follower" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until_ended(pids: list[int], timeout_s: float = 30.0) -> None:
    wait_until(lambda: all(map(has_ended, pids)), timeout_s)


def main() -> None:
    """A leader that says its ranks' pids and idles, with the thread hook of the engine process of a server."""
    import threading

    from faser_trtllm.serving.engine_process.opening import die_of_thread

    threading.excepthook = die_of_thread
    with ExitStack() as stack:
        open_target(EngineDir.load(Path(sys.argv[1])), stack)
        print(*rank_pids(os.getpid()), flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
