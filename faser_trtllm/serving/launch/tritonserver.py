"""Finds tritonserver, in the nvidia-pytriton wheel or in NVIDIA's container, and starts it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import faser_trtllm
from faser_trtllm.errors import UnavailableError
from faser_trtllm.serving.launch.limits import raise_limits
from faser_trtllm.serving.launch.process import die_with_parent

BACKEND = "faser"
LIBRARY = f"libtriton_{BACKEND}.so"


def find_tritonserver(binary: Path | None = None) -> Path:
    """The given server, else the wheel's, else the one on PATH; UnavailableError says how to get one."""
    if binary is not None:
        if not os.access(binary, os.X_OK):
            raise UnavailableError(f"tritonserver is {binary}, which is not an executable; name the server's binary")
        return binary
    spec = importlib.util.find_spec("pytriton")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        binary = Path(location) / "tritonserver" / "bin" / "tritonserver"
        if binary.exists():
            return binary
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return Path(on_path)
    raise UnavailableError(
        "no tritonserver was found; run `pip install --no-deps nvidia-pytriton==0.7.0`, "
        "or run in NVIDIA's Triton container"
    )


def backend_library() -> Path:
    """The library of the Triton backend `faser`."""
    path = Path(faser_trtllm.__file__).parent / "_native" / LIBRARY
    if not path.exists():
        raise UnavailableError(f"{LIBRARY} is missing beside the native library; run ./build.sh setup")
    return path


def link_backends(binary: Path, directory: Path) -> Path:
    """Make a backend directory of links: the backend `faser`, and those that the server has of its own."""
    (directory / BACKEND).mkdir(parents=True)
    (directory / BACKEND / LIBRARY).symlink_to(backend_library())
    own = binary.resolve().parent.parent / "backends"
    for backend in own.iterdir() if own.is_dir() else ():
        if backend.name != BACKEND:
            (directory / backend.name).symlink_to(backend)
    return directory


def spawn(command: list[str], environment: dict[str, str], log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """Start a server in a new session; it gets SIGTERM when this process ends. log: None is stderr."""
    parent_pid, apply_limits = os.getpid(), raise_limits()

    def prepare() -> None:
        die_with_parent(parent_pid, signal.SIGTERM)
        apply_limits()

    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log if log is not None else sys.stderr.fileno(),
        stderr=log,
        start_new_session=True,
        preexec_fn=prepare,
    )
