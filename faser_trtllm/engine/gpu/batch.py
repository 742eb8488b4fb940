"""The inputs of a pass in device memory, at fixed addresses for captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import Int32Array, RaggedBatch
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.ops.cuda.take_step import StepInputs
from faser_trtllm.ops.transfer.fill_inputs import PassLimits, fill_inputs

if TYPE_CHECKING:
    from torch import Tensor


class PassInputs(Protocol):
    """The inputs of a decoder's passes besides weights, KV and hidden rows.

    positions [max_num_tokens], cu_q_lens [num_slots + 1], kv_lens [num_slots] int32: the rows and requests in the
    decoder's order. row_of [num_rows]: the decoder's index of each row of the last batch uploaded; None: the same.
    """

    positions: Tensor
    cu_q_lens: Tensor
    kv_lens: Tensor
    row_of: Int32Array | None

    def clear(self) -> None:
        """Remove all requests, so that a pass computes dummies and writes no KV."""

    def upload(self, batch: RaggedBatch, rows: int, query_rows: int) -> None:
        """Copy a batch to the device asynchronously; raise InvalidArgumentError if it is invalid.

        rows: rows of the pass, with dummies. query_rows: an upper bound on the rows of any one request.
        """

    def take_step(self, ops: Ops, newest: Tensor, known: Tensor, remaining: Tensor, block_table: Tensor) -> None:
        """Set up a draft step of n requests on the device (ops/cuda/take_step.py)."""


TokenRows = Callable[[RaggedBatch, npt.NDArray[np.int64]], None]
"""Fills an array with the index of each row of a batch, then of each dummy, in a memory of one row per token."""


class DeviceBatch:
    """The int32 inputs of a pass: cu_q_lens [num_slots + 1], kv_lens [num_slots], block_table [num_slots,
    max_blocks_per_seq], token_ids, positions and logit_rows [max_num_tokens].

    first_branch [num_slots + 1]: the branches of request i are the batch's requests first_branch[i] to
    first_branch[i + 1]; None for an engine without branches. Unused requests have no rows. Rows after the last
    request's are dummies, which write nothing.
    """

    row_of: Int32Array | None = None

    def __init__(
        self,
        runtime: Runtime,
        spec: EngineSpec,
        max_blocks_per_seq: int | None = None,
        token_rows: TokenRows | None = None,
    ) -> None:
        """max_blocks_per_seq: columns of the block table, by default as many as max_seq_len needs. token_rows: fills
        self.token_rows, int64 [max_num_tokens], at each upload."""
        import torch

        batch, rows = spec.num_slots, spec.max_num_tokens
        self._token_rows = token_rows
        self.max_blocks_per_seq = max_blocks_per_seq or -(-spec.max_seq_len // spec.tokens_per_block)
        num_kept = 0 if token_rows is None else rows
        num_branch_ends = batch + 1 if spec.max_num_branches else 0
        # The block table, which is the largest part, is last, so that only the rows of a batch's requests are sent.
        sizes = (batch + 1, batch, rows, rows, rows, 2 * num_kept, num_branch_ends, batch * self.max_blocks_per_seq)
        ends = np.cumsum([-(-size // 4) * 4 for size in sizes]).tolist()  # sections begin at multiples of 16 bytes
        starts = [end - -(-size // 4) * 4 for end, size in zip(ends, sizes, strict=True)]
        self._first_row = starts[-1]
        self._kept = slice(starts[5], starts[5] + sizes[5])
        self._limits = PassLimits(
            vocab_size=spec.vocab_size,
            max_seq_len=spec.max_seq_len,
            tokens_per_block=spec.tokens_per_block,
            num_blocks=spec.num_kv_blocks,
            max_num_requests=batch,
            max_num_rows=rows,
            max_num_branches=spec.max_num_branches,
            max_blocks_per_seq=self.max_blocks_per_seq,
            starts=[*starts[:5], starts[6] if num_branch_ends else -1, starts[7]],
        )
        self._staging = Staging(runtime, ends[-1])
        views = [self._staging.device[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        self.cu_q_lens, self.kv_lens, self.token_ids, self.positions, self.logit_rows, kept, branches, table = views
        self.first_branch: Tensor | None = branches if num_branch_ends else None
        self.token_rows = kept.view(torch.int64)
        self.block_table = table.view(batch, self.max_blocks_per_seq)
        self._step_inputs = StepInputs(
            self.token_ids, self.positions, self.logit_rows, self.kv_lens, self.cu_q_lens, self.block_table
        )

    def clear(self) -> None:
        self._staging.device.zero_()

    def upload(self, batch: RaggedBatch, rows: int, query_rows: int) -> None:
        filled = self._staging.fill()
        fill_inputs(batch, self._limits, filled)
        if self._token_rows is not None:
            self._token_rows(batch, filled[self._kept].view(np.int64))
        self._staging.send(self._first_row + batch.num_requests * self.max_blocks_per_seq)

    def take_step(self, ops: Ops, newest: Tensor, known: Tensor, remaining: Tensor, block_table: Tensor) -> None:
        ops.take_step(newest, known, remaining, block_table, self._step_inputs)
