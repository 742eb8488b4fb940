"""References of ops/cuda/take_step.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
from faser_trtllm.ops.cuda.take_step import StepInputs


def take_step_reference(newest: Tensor, known: Tensor, remaining: Tensor, table: Tensor, inputs: StepInputs) -> None:
    """Do what take_step() does, in torch on any device."""
    import torch

    size, columns = table.shape
    goes_on = remaining > 0
    kept = torch.where(goes_on, known, 0)
    inputs.token_ids[:size] = newest
    inputs.positions[:size] = (kept - 1).clamp(min=0)
    inputs.kv_lens.zero_()
    inputs.kv_lens[:size] = kept
    requests = torch.arange(inputs.cu_q_lens.shape[0], dtype=torch.int32, device=table.device)
    inputs.cu_q_lens.copy_(requests.clamp(max=size))
    inputs.block_table[:size, :columns] = table
    inputs.logit_rows[:size] = requests[:size]
