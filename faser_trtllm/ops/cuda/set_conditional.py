"""set_conditional: set the condition of a CUDA graph's conditional node from a number on the device, by one thread."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.tensors import pointer

if TYPE_CHECKING:
    from torch import Tensor

STEM = "set_conditional"


def set_conditional(launcher: Launcher, value: Tensor | None, handle: int) -> None:
    """Set the condition to value int32 [1], on the device, asynchronously.

    value None: the kernel sets nothing and may run outside of graphs. handle: from cuGraphConditionalHandleCreate; the
    launch must be in the graph and context of that call.
    """
    arguments = (pointer("value", value, "int32", (1,)), ctypes.c_uint64(handle))
    launcher.launch("set_conditional", (1, 1, 1), (1, 1, 1), arguments)
