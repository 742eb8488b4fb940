"""Finds tritonserver, in the nvidia-pytriton wheel or in NVIDIA's container, checks it and starts it."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import IO

import faser_trtllm
from faser_trtllm.errors import InvalidArgumentError, UnavailableError
from faser_trtllm.serving.launch.limits import raise_limits
from faser_trtllm.serving.launch.process import die_with_parent

BACKEND = "faser"
LIBRARY = f"libtriton_{BACKEND}.so"
FIXED_VERSION = (2, 71)  # of the container FIXED_CONTAINER; docs/operate.md lists what is wrong with older ones
FIXED_CONTAINER = "26.07"
_NO_GPU = b"CudaDriverHelper has not been initialized."  # Triton 2.51 logs this as an error without a GPU


def find_tritonserver(binary: Path | None = None) -> Path:
    """Return `binary`, else the server of the nvidia-pytriton wheel, else the one on PATH; raise UnavailableError."""
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


def check_exposure(host: str, binary: Path) -> None:
    """Raise InvalidArgumentError if other machines can reach a server with known vulnerabilities or unknown version."""
    version = _version_of(binary)
    if is_loopback(host) or (version is not None and version >= FIXED_VERSION):
        return
    raise InvalidArgumentError(
        f"host is {host}, where others can reach it, but {binary} is "
        f"{'of unknown version' if version is None else f'Triton {version[0]}.{version[1]}'} and versions before "
        f"{FIXED_VERSION[0]}.{FIXED_VERSION[1]} (NVIDIA's container {FIXED_CONTAINER}) have known vulnerabilities; "
        "listen on 127.0.0.1 next to a proxy, or accept them with --allow_vulnerable_triton"
    )


def _version_of(binary: Path) -> tuple[int, int] | None:
    """Read the major and minor version from a file in NVIDIA's container; None in the wheel, which lacks the file."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found = re.match(r"(\d+)\.(\d+)", (binary.resolve().parent.parent / "TRITON_VERSION").read_text())
        if found is not None:
            return int(found[1]), int(found[2])
    return None


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the address. A name other than localhost may be any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def backend_library() -> Path:
    """Return the path of the Triton backend `faser`; raise UnavailableError if it was not built."""
    path = Path(faser_trtllm.__file__).parent / "_native" / LIBRARY
    if not path.exists():
        raise UnavailableError(f"{LIBRARY} is missing next to the native library; run ./build.sh setup")
    return path


def link_backends(binary: Path, directory: Path) -> Path:
    """Fill a directory with links to the backend `faser` and to the server's own backends, and return it."""
    (directory / BACKEND).mkdir(parents=True)
    (directory / BACKEND / LIBRARY).symlink_to(backend_library())
    own = binary.resolve().parent.parent / "backends"
    for backend in own.iterdir() if own.is_dir() else ():
        if backend.name != BACKEND:
            (directory / backend.name).symlink_to(backend)
    return directory


def pass_on(messages: IO[bytes]) -> None:
    """Write a server's messages to stderr until it ends; drop messages that cannot be written."""
    with messages:
        for line in messages:
            if _NO_GPU not in line:
                with contextlib.suppress(OSError):
                    os.write(2, line)


def spawn(command: list[str], environment: dict[str, str], log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """Start a server in a new session; it gets SIGTERM when this process ends.

    Without a log file, its messages go to its `stdout`, a pipe that must be read (pass_on).
    """
    parent_pid, apply_limits = os.getpid(), raise_limits()

    def prepare() -> None:
        die_with_parent(parent_pid, signal.SIGTERM)
        apply_limits()

    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log if log is not None else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=prepare,
    )
