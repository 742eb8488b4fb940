"""Our CUDA kernels as TensorRT quick-deploy plugins, compiled ahead of time: no Python runs at inference.

register() adds them to a TensorRT module; a network then calls trt.plugin.op.faser.<name>. README.md lists inputs,
outputs and limits. Validated without a GPU; no engine with a plugin has been built or run yet.
"""

from __future__ import annotations

import importlib
from typing import Any

from faser_trtllm.builder.plugins import (
    append_kv,
    compact_rows,
    early_exit,
    prune_rows,
    verify_attention,
    verify_attention_combine,
)
from faser_trtllm.builder.plugins.kernel_code import KernelCode
from faser_trtllm.errors import ConfigError

__all__ = ["PLUGIN_IDS", "KernelCode", "register"]

_DESCRIPTORS = {
    "faser::append_kv": append_kv,
    "faser::verify_attention": verify_attention,
    "faser::verify_attention_combine": verify_attention_combine,
    "faser::early_exit": early_exit,
    "faser::prune_rows": prune_rows,
    "faser::compact_rows": compact_rows,
}
PLUGIN_IDS = tuple(_DESCRIPTORS)

_registered: dict[Any, KernelCode] = {}


def register(trt: Any, arch: str | None = None, kind: str = "cubin") -> tuple[str, ...]:
    """Register the plugins with a tensorrt module (10.13 or newer) and return their ids.

    arch: target architecture of the kernels, like "sm_90"; None: device 0's. kind: "cubin" for that architecture only,
    or "ptx", which newer GPUs also run, but only with drivers as new as nvcc. Kernels are compiled when an engine that
    uses them is built. Repeated registration has no effect. Raises ConfigError if the module lacks plugin support, or
    the plugins are registered for another target.
    """
    if arch is None:
        from faser_trtllm.ops.cuda.driver import device_arch

        arch = device_arch()
    code = KernelCode(arch, kind)
    known = _registered.get(trt)
    if known is not None and known != code:
        raise ConfigError(
            f"the plugins are registered for {known.arch} ({known.kind}) and cannot be for {arch} ({kind}) as well; "
            "build for one target per process"
        )
    if known is None:
        trtp = _plugin_module(trt)
        for descriptor in _DESCRIPTORS.values():
            descriptor.register(trt, trtp, code)
        _registered[trt] = code
    return PLUGIN_IDS


def _plugin_module(trt: Any) -> Any:
    try:
        trtp = importlib.import_module(f"{trt.__name__}.plugin")
    except ImportError as error:
        raise _no_plugins(trt) from error
    if not hasattr(trtp, "aot_impl"):
        raise _no_plugins(trt)
    return trtp


def _no_plugins(trt: Any) -> ConfigError:
    return ConfigError(
        f"{trt.__name__} {trt.__version__} has no ahead-of-time plugins; install tensorrt 10.13 or newer, or build "
        "with --backend tensorrt_rtx, which needs none"
    )
