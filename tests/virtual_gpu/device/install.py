"""Puts the virtual GPU in a process, before anything asks for a GPU. It cannot be taken out again."""

from __future__ import annotations

import functools

from tests.virtual_gpu.device.library import compile_stem, driver


@functools.cache
def install() -> None:
    """From here on the driver, torch's streams, the kernels' images and TensorRT are the stand-ins.

    The driver is found by its name, since it is loaded already; the rest of this is the list of what is replaced.
    """
    driver()
    from faser_trtllm.builder import tensorrt_engine
    from faser_trtllm.engine.gpu import runtime
    from faser_trtllm.engine.tensorrt import open as tensorrt_open
    from faser_trtllm.ops.cuda import compiler
    from lab.interpreted import layers
    from tests.virtual_gpu.device import plugins, tensorrt
    from tests.virtual_gpu.device.runtime import VirtualRuntime

    runtime.CudaRuntime = VirtualRuntime  # type: ignore[assignment, misc]
    compiler.compile_stem = compile_stem
    tensorrt_engine.open_builder = tensorrt.open_builder
    tensorrt_open.load_tensorrt = tensorrt.load
    layers.RULES["MATRIX_MULTIPLY"] = plugins.matrix_multiply
