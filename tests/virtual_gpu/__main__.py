"""`python -m tests.virtual_gpu faser COMMAND ...`: any command of faser with the virtual GPU in place of one.

`serve` starts the real Triton server; only its engine process has the virtual GPU. `bench gpu` needs --dry_run, for
tiny shapes; its sections then run as they would on a GPU. VIRTUAL_GPU_COUNTERS names a file that the counters are
written to, again and again.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from tests.virtual_gpu.device.library import driver, why_not

COUNTERS = "VIRTUAL_GPU_COUNTERS"
_WRITE_PERIOD_S = 0.2
_BENCH = ["bench", "gpu"]
_PROGRAMS = ("faser", "section_process")


def main() -> None:
    program, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if program not in _PROGRAMS:
        sys.exit("usage: python -m tests.virtual_gpu faser COMMAND ...")
    if arguments[:2] == _BENCH and "--dry_run" not in arguments:
        sys.exit("bench gpu needs --dry_run here: the virtual GPU is too slow for the shapes of real models")
    if reason := why_not():
        sys.exit(reason)
    import torch

    from tests.virtual_gpu.device import interrupt
    from tests.virtual_gpu.device.install import install

    torch.set_num_threads(1)
    install()
    interrupt.install()
    if arguments[:1] == ["serve"]:
        os.environ["FASER_ENGINE_MODULE"] = "tests.virtual_gpu.engine_process"
    else:
        write_counters()
    if program == "section_process":
        from tests.virtual_gpu.bench_section import main as run_section

        sys.argv = [program, *arguments]
        run_section()
    if arguments[:2] == _BENCH:
        from tests.virtual_gpu.bench_section import use_in_bench

        use_in_bench()
    from faser_trtllm.cli import main as faser

    sys.argv = ["faser", *arguments]
    faser()


def write_counters() -> None:
    """Write them again and again from now on, if COUNTERS names a file."""
    if path := os.environ.get(COUNTERS):
        threading.Thread(target=_write_counters, args=(Path(path),), daemon=True).start()


def _write_counters(path: Path) -> None:
    while True:
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(driver().counters())
        scratch.replace(path)
        time.sleep(_WRITE_PERIOD_S)


if __name__ == "__main__":
    main()
