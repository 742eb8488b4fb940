"""A tensorrt module with our plugins registered, without TensorRT."""

from __future__ import annotations

import subprocess
import sys

import pytest

from faser_trtllm.builder import plugins
from faser_trtllm.errors import FaserError
from faser_trtllm.ops.cuda.compiler import cache_dir, find_nvcc
from tests.builder.plugins import stand_in


@pytest.fixture(scope="session")
def bindings():
    """The Python files of TensorRT's bindings."""
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx for TensorRT's enums")
    folder = cache_dir().parent / stand_in.BINDINGS.replace("==", "-")
    try:
        return stand_in.download(folder)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"the wheel {stand_in.BINDINGS} cannot be downloaded: {error}")


@pytest.fixture(scope="session")
def trt(bindings):
    """The stand-in, with plugins for sm_90 as PTX."""
    try:
        find_nvcc()
    except FaserError as error:
        pytest.skip(str(error))
    module = stand_in.load(bindings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt", module)
        patch.setitem(sys.modules, "tensorrt.plugin", module.plugin)
        plugins.register(module, "sm_90", "ptx")
    return module
