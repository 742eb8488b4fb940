"""`python -m tests.virtual_gpu faser COMMAND ...`: any command of faser with the virtual GPU in place of one.

`serve` starts the real Triton server; only its engine process has the virtual GPU. `bench gpu` needs --dry_run, for
tiny shapes; its sections then run as they would on a GPU. VIRTUAL_GPU_COUNTERS names a file that the counters are
written to, again and again.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.virtual_gpu.device.library import driver, why_not

COUNTERS = "VIRTUAL_GPU_COUNTERS"
_WRITE_PERIOD_S = 0.2
_BENCH = ["bench", "gpu"]
_PROGRAMS = ("faser", "engine_process", "section_process")
_ENGINE_COMMAND = '(sys.executable, "-m", "tests.virtual_gpu", "engine_process")'


def main() -> None:
    program, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if program not in _PROGRAMS:
        sys.exit("usage: python -m tests.virtual_gpu faser COMMAND ...")
    if arguments[:2] == _BENCH and "--dry_run" not in arguments:
        sys.exit("bench gpu needs --dry_run here: the virtual GPU is too slow for the shapes of real models")
    if reason := why_not():
        sys.exit(reason)
    import torch

    from tests.virtual_gpu.device.install import install

    torch.set_num_threads(1)
    install()
    is_server = arguments[:1] == ["serve"]
    if (path := os.environ.get(COUNTERS)) and not is_server:  # its engine process writes them
        threading.Thread(target=_write_counters, args=(Path(path),), daemon=True).start()
    if program == "engine_process":
        from faser_trtllm.serving.worker.engine_process import main as run

        run(arguments)
        return
    if program == "section_process":
        from tests.virtual_gpu.bench_section import main as run_section

        sys.argv = [program, *arguments]
        run_section()
    if arguments[:2] == _BENCH:
        from tests.virtual_gpu.bench_section import use_in_bench

        use_in_bench()
    from faser_trtllm.cli import main as faser

    with tempfile.TemporaryDirectory() as folder:
        if is_server and "--model_repo" not in arguments:
            arguments += ["--model_repo", str(repository(Path(folder)))]
        sys.argv = ["faser", *arguments]
        faser()


def repository(folder: Path) -> Path:
    """A copy of the project's Triton model repository whose engine process has the virtual GPU."""
    copy = folder / "triton_model_repo"
    shutil.copytree(Path(__file__).parents[2] / "triton_model_repo", copy)
    for model in copy.glob("*/1/model.py"):
        own = model.read_text()
        if "open_model(pb_utils, args)" in own:
            changed = own.replace("open_model(pb_utils, args)", f"open_model(pb_utils, args, {_ENGINE_COMMAND})")
            model.write_text(changed.replace("import triton_python", "import sys\n\nimport triton_python", 1))
    return copy


def _write_counters(path: Path) -> None:
    while True:
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(driver().counters())
        scratch.replace(path)
        time.sleep(_WRITE_PERIOD_S)


if __name__ == "__main__":
    main()
