"""Finds tritonserver, in the nvidia-pytriton wheel or in NVIDIA's container, and starts it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import faser_trtllm
from faser_trtllm.errors import UnavailableError
from faser_trtllm.serving.launch.limits import raise_limits
from faser_trtllm.serving.worker.process import die_with_parent

NATIVE_BACKEND = "libtriton_faser.so"
OWN_BACKENDS = Path("/opt/tritonserver/backends")  # of NVIDIA's container


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """A tritonserver. wheel_dir: the folder `tritonserver` of the wheel; None for a server from elsewhere."""

    binary: Path
    wheel_dir: Path | None = None

    def link_backends(self, directory: Path) -> Path | None:
        """Create a backend directory for this Python out of links; None if the server has its own."""
        if self.wheel_dir is None:
            return None
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = self.wheel_dir / "python_backend_stubs" / version / "triton_python_backend_stub"
        if not stub.exists():
            raise UnavailableError(f"nvidia-pytriton has no stub for Python {version}; use Python 3.10, 3.11 or 3.12")
        backend = directory / "python"
        backend.mkdir(parents=True)
        for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
            (backend / name).symlink_to(self.wheel_dir / "backends" / "python" / name)
        (backend / stub.name).symlink_to(stub)
        return directory

    def link_native_backend(self, directory: Path) -> Path:
        """Create a backend directory with the backend `faser`, beside the backends that the server has of its own."""
        directory.mkdir(parents=True)
        if self.wheel_dir is None and OWN_BACKENDS.is_dir():
            for own in OWN_BACKENDS.iterdir():
                if own.name != "faser":
                    (directory / own.name).symlink_to(own)
        (directory / "faser").mkdir()
        (directory / "faser" / NATIVE_BACKEND).symlink_to(native_backend())
        return directory

    def environment(self, edge: str = "python") -> dict[str, str]:
        """The environment for the server, so that its stub or engine process is this Python."""
        environment = dict(os.environ)
        if edge == "native":
            return {"FASER_PYTHON": sys.executable} | environment
        if self.wheel_dir is None:
            return environment
        environment["PATH"] = _joined(str(Path(sys.executable).parent), environment.get("PATH"))
        environment["LD_LIBRARY_PATH"] = _joined(str(_libpython_dir()), environment.get("LD_LIBRARY_PATH"))
        return environment


def native_backend() -> Path:
    """The library of the Triton backend `faser`."""
    path = Path(faser_trtllm.__file__).parent / "_native" / NATIVE_BACKEND
    if not path.exists():
        raise UnavailableError(f"{NATIVE_BACKEND} is missing beside the native library; run ./build.sh setup")
    return path


def find_tritonserver(binary: Path | None = None, edge: str = "python") -> TritonInstall:
    """The given server, else the wheel's, else the one on PATH; UnavailableError says how to get one."""
    if binary is not None:
        if not os.access(binary, os.X_OK):
            raise UnavailableError(f"tritonserver is {binary}, which is not an executable; name the server's binary")
        return TritonInstall(binary)
    spec = importlib.util.find_spec("pytriton")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        wheel_dir = Path(location) / "tritonserver"
        if (wheel_dir / "bin" / "tritonserver").exists():
            if edge == "python":
                _check_numpy()
            return TritonInstall(wheel_dir / "bin" / "tritonserver", wheel_dir)
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return TritonInstall(Path(on_path))
    raise UnavailableError(
        "no tritonserver was found; run `pip install --no-deps nvidia-pytriton==0.7.0`, "
        "or run in NVIDIA's Triton container"
    )


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


def _check_numpy() -> None:
    """The stub of this wheel crashes on the first request with numpy 2."""
    version = importlib.metadata.version("numpy")
    if int(version.partition(".")[0]) >= 2:
        raise UnavailableError(
            f"numpy is {version}, the Triton server of nvidia-pytriton needs a version below 2; "
            'run `pip install "numpy<2"`'
        )


def _libpython_dir() -> Path:
    """The folder of libpython; without it the stub may load another Python of the same version."""
    directory = Path(sysconfig.get_config_var("LIBDIR") or "")
    name = sysconfig.get_config_var("INSTSONAME") or ""
    if not name.startswith("libpython") or ".so" not in name or not (directory / name).exists():
        raise UnavailableError(
            f"Python's shared library was not found in {directory}; use a Python built with --enable-shared"
        )
    return directory


def _joined(first: str, rest: str | None) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else first
