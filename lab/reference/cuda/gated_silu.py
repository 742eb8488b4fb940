"""References of ops/cuda/gated_silu.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.reference.cuda.append_kv import inverse_rms

if TYPE_CHECKING:
    from torch import Tensor


def gated_silu_reference(gate_up: Tensor, hidden: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
    """Compute silu(gate) * up of gate_up / rms(hidden) + bias, in fp32 (fp64 for a gate_up of fp64).

    gate_up [num_rows, 2 * inner]: the product of hidden [num_rows, hidden_size], which was not normalized; of out's
    type, bf16 or fp16, but fp32 for fp16, whose range it may leave. bias [2 * inner] or None.
    """
    import torch

    wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    wide = wide * inverse_rms(hidden.to(wide.dtype), eps)
    gate, up = (wide if bias is None else wide + bias.to(wide.dtype)).chunk(2, -1)
    out.copy_(gate / (1 + (-gate).exp()) * up)
