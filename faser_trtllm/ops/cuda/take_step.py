"""take_step: prepare the inputs of a draft step's pass, one row per request, in one launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.tensors import pointer

if TYPE_CHECKING:
    from torch import Tensor

STEM = "take_step"
NUM_THREADS = 128


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A pass's inputs, int32."""

    token_ids: Tensor  # [num_rows]
    positions: Tensor  # [num_rows]
    logit_rows: Tensor  # [num_rows]
    kv_lens: Tensor  # [n]
    cu_q_lens: Tensor  # [n + 1]
    block_table: Tensor  # [n, max_blocks_per_seq]


def take_step(
    launcher: Launcher,
    newest: Tensor,
    known: Tensor,
    remaining: Tensor,
    table: Tensor,
    inputs: StepInputs,
) -> None:
    """Set up a row with the newest token of each of m requests, and no other rows; logits are in the requests' order.

    newest int32 [m]: token ids. known int32 [m]: number of tokens, with the newest. remaining int32 [m]: 0 if a request
    has ended, which then writes no KV. table int32 [m, at most max_blocks_per_seq]: the requests' blocks. Contiguous
    device tensors; asynchronous.
    """
    (size, columns), max_requests = table.shape, inputs.kv_lens.shape[0]
    width = inputs.block_table.shape[1]
    if size > max_requests or size > inputs.token_ids.shape[0] or columns > width:
        raise InvalidArgumentError(
            f"table is {size} x {columns}, the inputs have room for {max_requests} requests of {width} blocks and "
            f"{inputs.token_ids.shape[0]} rows"
        )
    requests = (("newest", newest), ("known", known), ("remaining", remaining))
    rows = (("token_ids", inputs.token_ids), ("positions", inputs.positions), ("logit_rows", inputs.logit_rows))
    arguments = (
        *(pointer(name, tensor, "int32", (size,)) for name, tensor in requests),
        pointer("table", table, "int32", (None, None)),
        *map(ctypes.c_int32, (size, max_requests, columns, width)),
        *(pointer(name, tensor, "int32", tuple(inputs.token_ids.shape)) for name, tensor in rows),
        pointer("kv_lens", inputs.kv_lens, "int32", (max_requests,)),
        pointer("cu_q_lens", inputs.cu_q_lens, "int32", (max_requests + 1,)),
        pointer("block_table", inputs.block_table, "int32", (max_requests, width)),
    )
    launcher.launch("take_step", (max_requests, 1, 1), (NUM_THREADS, 1, 1), arguments)
