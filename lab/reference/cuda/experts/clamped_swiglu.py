"""References of ops/cuda/experts/clamped_swiglu.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faser_trtllm.models.experts import GATE_ALPHA, GATE_LIMIT

if TYPE_CHECKING:
    from torch import Tensor


def clamped_swiglu_reference(gate_up: Tensor, bias: Tensor, ends: Tensor, out: Tensor) -> None:
    """Compute (up + 1) * (gate * sigmoid(GATE_ALPHA * gate)), with gate at most GATE_LIMIT and up within
    +-GATE_LIMIT, of gate_up + bias in fp32 (fp64 for a gate_up of fp64), as in transformers' modeling_gpt_oss.py.

    gate_up [num_pairs, 2 * inner]: gates, then ups, of pairs sorted by expert; bias [num_experts, 2 * inner]; ends
    int32 [num_experts]: the number of pairs up to and including each expert. Pairs after the last one are not written
    to out [num_pairs, inner].
    """
    import torch

    begin, kind = 0, torch.promote_types(gate_up.dtype, torch.float32)
    for expert, end in enumerate(ends.tolist()):
        gate, up = (gate_up[begin:end].to(kind) + bias[expert].to(kind)).chunk(2, -1)
        gate, up = gate.clamp(max=GATE_LIMIT), up.clamp(-GATE_LIMIT, GATE_LIMIT)
        out[begin:end] = ((up + 1) * (gate * torch.sigmoid(GATE_ALPHA * gate))).to(out.dtype)
        begin = end
