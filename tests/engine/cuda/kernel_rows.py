"""Targets on the host whose rows go through the kernels themselves, emulated; and a library that counts rows."""

from __future__ import annotations

import functools

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.gpu.reference_ops import ReferenceOps
from faser_trtllm.engine.gpu.ops import Ops
from tests.engine.cuda.host_executor import HostGpu
from tests.ops.cuda.emulation import emulated

ROW_OPS = ("linear", "add_linear", "logits", "append_kv", "gated_silu", "verify_attention")
ROW_OPS += ("route_rows", "grouped_linear", "clamped_swiglu", "combine_rows")


class KernelRowsGpu(HostGpu):
    """In the engine file's type. The draft, which is opened after the target and may run at once with it, has the
    kernels' references: the emulator runs one block at a time."""

    weights_dtype = None

    def __init__(self):
        self._has_target = False

    def make_ops(self, runtime, head_dim, deterministic=False, has_mxfp4=False):
        is_target, self._has_target = not self._has_target, True
        return KernelRows(deterministic) if is_target else ReferenceOps()


class KernelRows(ReferenceOps):
    """Products by matmul and grouped_matmul if deterministic, else by torch."""

    def __init__(self, deterministic):
        super().__init__()
        self.is_deterministic = deterministic
        found = {stem: held for stem, held in launchers().items() if deterministic or "matmul" not in stem}
        kernels = Ops(found, lambda: 0, num_sms=4, deterministic=deterministic)
        for name in ROW_OPS:
            setattr(self, name, getattr(kernels, name))


@functools.cache
def launchers():
    stems = ("append_kv", "gated_silu", "matmul", "route_rows", "grouped_matmul", "clamped_swiglu", "combine_rows")
    found = {stem: emulated(stem) for stem in stems}
    return found | {"verify_attention": emulated("verify_attention", {"FASER_HEAD_DIM": 64})}


class RowCountProducts(TorchFunctionMode):
    """torch's products, in as many parts of the inputs as the number of rows says: a row's bits depend on it, as a
    library's may. Each part is rounded to three bits, so that a few texts show it. Counts products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.mm:
            found = self._product(*args)
            out = kwargs.get("out")
            return found.to(kwargs.get("out_dtype", args[0].dtype)) if out is None else out.copy_(found)
        if func is torch.nn.functional.grouped_mm:
            x, weights = args
            found, begin = torch.zeros(len(x), weights.shape[-1]), 0
            for weight, end in zip(weights, kwargs["offs"].tolist(), strict=True):
                found[begin:end], begin = self._product(x[begin:end], weight), end
            return found.to(x.dtype)
        if func is torch.Tensor.addmm_:
            hidden, *operands = args
            return hidden.copy_(hidden.float() + self._product(*operands))
        return func(*args, **kwargs)

    def _product(self, x, weight):
        self.count += 1
        parts = zip(x.tensor_split(1 + len(x) % 4, 1), weight.tensor_split(1 + len(x) % 4, 0), strict=True)
        return sum((part.float() @ other.float()).to(torch.float8_e5m2).float() for part, other in parts)
