"""DFlash2's convolutions over the rows of a block, one on each side of a sublayer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows

if TYPE_CHECKING:
    from torch import Tensor


class BlockConvolution:
    """out_t = sum over taps of (base + delta_t) * x_(t - tap), from a block's first row on; in fp32, rounded once."""

    def __init__(self, ops: Ops, block_size: int, normed: Tensor, base: Tensor | None, delta: Tensor | None) -> None:
        """normed [rows, hidden]: the sublayer's input, of whole blocks. base [2, taps, hidden], delta [2 * taps *
        groups, hidden]; None: no convolution."""
        self._ops, self._block_size = ops, block_size
        self._taps: Tensor | None = None
        if base is not None and delta is not None:
            sides, taps, hidden = base.shape
            deltas = ops.linear(normed, delta).view(-1, block_size, sides, taps, delta.shape[0] // (sides * taps))
            deltas = deltas.float().repeat_interleave(hidden // deltas.shape[-1], -1)
            self._taps = (deltas + base.float()).movedim((2, 3), (0, 1))  # [2, taps, blocks, block_size, hidden]

    def before(self, x: Tensor) -> Tensor:
        """Return the sublayer's input, convolved."""
        return x if self._taps is None else self._convolved(x, self._taps[0])

    def add(self, hidden: Tensor, x: Tensor, weight: Tensor | ScaledRows, bias: Tensor | None) -> None:
        """Add the sublayer's output, x times weight plus bias, to `hidden`."""
        if self._taps is None:
            self._ops.add_linear(hidden, x, weight, bias)
            return
        output = self._ops.linear(x, weight)
        hidden += self._convolved(output if bias is None else output + bias, self._taps[1])

    def _convolved(self, x: Tensor, taps: Tensor) -> Tensor:
        rows = x.view(-1, self._block_size, x.shape[1]).float()
        found = taps[0] * rows
        for tap in range(1, taps.shape[0]):
            found[:, tap:] += taps[tap, :, tap:] * rows[:, :-tap]
        return found.to(x.dtype).view(x.shape)
