"""The GPU's memory and streams through cuda-python's real bindings, over a stand-in of the driver's library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="needs pip install cuda-bindings==13.0.3")

SCRIPT = """
import numpy as np
from faser_trtllm.engine.tensorrt_device import Device
from faser_trtllm.errors import FaserError

with Device() as device:
    assert device.compute_capability == "8.9"
    stream = device.create_stream()
    source, target = device.allocate(64), device.allocate(64)
    assert source % 256 == 0
    sent, received = device.host_array((2, 4), np.int32), device.host_array((2, 4), np.int32)
    device.download(received, source, stream)
    assert not received.any(), "device memory is zeroed"
    sent[:] = np.arange(8).reshape(2, 4)
    device.upload(source, sent, stream)
    device.copy(target + 32, source, 32, stream)
    device.zero(target + 48, 8, stream)
    device.download(received, target + 32, stream)
    device.synchronize(stream)
    assert received.tolist() == [[0, 1, 2, 3], [0, 0, 6, 7]]
    try:
        device.upload(source, sent[:, 1:], stream)
    except ValueError:
        print("strided refused")
    device.begin_capture(stream)
    graph = device.end_capture(stream)
    device.launch_graph(graph, stream)
    device.destroy_graph(graph)
    wrong = (device.allocate, 2 << 30), (device.synchronize, 7), (device.launch_graph, 7, stream)
    for method, *arguments in wrong:
        try:
            method(*arguments)
        except FaserError as error:
            print(error)
    for array in (sent, received):
        device.free_host(array)
    for address in (source, target):
        device.free(address)
    device.destroy_stream(stream)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libcuda.so.1 is Linux's name")
def test_the_bindings_are_called_as_they_want_it(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = Path(__file__).parent / "libcuda_stand_in.cpp"
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-std=c++17", "-o", library, source, "-ldl"], check=True)
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "LIBCUDA_LOG": str(log)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "strided refused",
        "cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY for 2048 MiB",
        "cuStreamSynchronize failed with CUDA_ERROR_INVALID_HANDLE",
        "cuGraphLaunch failed with CUDA_ERROR_INVALID_HANDLE",
    ]
    calls = log.read_text().split()
    for made, freed in {
        "cuMemAlloc": "cuMemFree",
        "cuMemHostAlloc": "cuMemFreeHost",
        "cuStreamCreate": "cuStreamDestroy",
        "cuStreamEndCapture": "cuGraphDestroy",
        "cuGraphInstantiateWithFlags": "cuGraphExecDestroy",
        "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease",
    }.items():
        assert calls.count(made) == calls.count(freed) > 0, (made, freed)
    assert calls[-1] == "cuDevicePrimaryCtxRelease"
