"""The inputs of a pass in device memory, at fixed addresses for captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from faser_trtllm.builder.network.inputs import plugin_inputs
from faser_trtllm.core.batch import Int32Array, RaggedBatch
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.take_step import StepInputs

if TYPE_CHECKING:
    from torch import Tensor


class PassInputs(Protocol):
    """What a decoder's passes read beside weights, KV and hidden rows.

    positions [max_num_tokens], cu_q_lens [num_slots + 1], kv_lens [num_slots] int32: the rows and requests as the
    decoder has them. row_of [num_rows]: where the decoder has each row of the batch uploaded last; None: in its order.
    """

    positions: Tensor
    cu_q_lens: Tensor
    kv_lens: Tensor
    row_of: Int32Array | None

    def clear(self) -> None:
        """Remove all requests: a pass then computes dummies and writes no KV."""

    def upload(self, batch: RaggedBatch, rows: int, query_rows: int) -> None:
        """Copy a batch to the device asynchronously; InvalidArgumentError if it is invalid.

        rows: of the pass, dummies included. query_rows: at least those of any one request.
        """

    def take_step(self, ops: Ops, newest: Tensor, known: Tensor, remaining: Tensor, block_table: Tensor) -> None:
        """Set up a draft step of n requests, on the device, as ops/cuda/take_step.py has it."""


TokenRows = Callable[[RaggedBatch, npt.NDArray[np.int64]], None]
"""Writes, for each row of a batch and then for dummies, which row of a memory by token is its own."""


class DeviceBatch:
    """The int32 inputs of a pass: cu_q_lens [num_slots + 1], kv_lens [num_slots], block_table [num_slots,
    max_blocks_per_seq], token_ids, positions and logit_rows [max_num_tokens].

    first_branch [num_slots + 1]: which requests of the batch are a request's branches (ops/cuda/append_kv.py); None for
    an engine without branches. Unused requests have no rows; rows after the last request's are dummies, which write
    nothing.
    """

    row_of: Int32Array | None = None

    def __init__(
        self,
        runtime: Runtime,
        spec: EngineSpec,
        max_blocks_per_seq: int | None = None,
        token_rows: TokenRows | None = None,
    ) -> None:
        """max_blocks_per_seq: columns of the block table; default: what max_seq_len needs. token_rows: fills
        self.token_rows, int64 [max_num_tokens], with an upload."""
        import torch

        batch, rows = spec.num_slots, spec.max_num_tokens
        self._spec = spec
        self._token_rows = token_rows
        self.max_blocks_per_seq = max_blocks_per_seq or -(-spec.max_seq_len // spec.tokens_per_block)
        num_kept = 0 if token_rows is None else rows
        num_branch_ends = batch + 1 if spec.max_num_branches else 0
        # The block table is last, so that only the rows of a batch's requests are sent: it is most of all this.
        sizes = (batch + 1, batch, rows, rows, rows, 2 * num_kept, num_branch_ends, batch * self.max_blocks_per_seq)
        ends = np.cumsum([-(-size // 4) * 4 for size in sizes]).tolist()  # sections begin at multiples of 16 bytes
        self._sections = [(end - -(-size // 4) * 4, size) for end, size in zip(ends, sizes, strict=True)]
        self._staging = Staging(runtime, ends[-1])
        views = [self._staging.device[start : start + size] for start, size in self._sections]
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
        self._check(batch)
        used = replace(batch, block_table=batch.block_table[:, : self._num_blocks(batch)])
        inputs = plugin_inputs(used, self._spec.max_seq_len).arrays
        filled = self._staging.fill()
        sections = [filled[start : start + size] for start, size in self._sections]
        cu_q_lens, kv_lens, token_ids, positions, logit_rows, kept, first_branch, table = sections
        n, num_rows = batch.num_requests, batch.num_rows
        cu_q_lens[: n + 1] = inputs["cu_q_lens"]
        cu_q_lens[n + 1 :] = num_rows
        kv_lens[:n] = inputs["kv_lens"]
        kv_lens[n:] = 0
        width = inputs["block_table"].shape[1]
        table.reshape(-1, self.max_blocks_per_seq)[:n, :width] = inputs["block_table"]
        for section, values in ((token_ids, batch.token_ids), (positions, batch.positions)):
            section[:num_rows] = values
            section[num_rows:] = 0
        logit_rows[: batch.logit_rows.size] = batch.logit_rows
        logit_rows[batch.logit_rows.size :] = 0
        if self.first_branch is not None:
            _fill_first_branch(batch, first_branch)
        if self._token_rows is not None:
            self._token_rows(batch, kept.view(np.int64))
        first_row, _ = self._sections[-1]
        self._staging.send(first_row + n * self.max_blocks_per_seq)

    def take_step(self, ops: Ops, newest: Tensor, known: Tensor, remaining: Tensor, block_table: Tensor) -> None:
        ops.take_step(newest, known, remaining, block_table, self._step_inputs)

    def _num_blocks(self, batch: RaggedBatch) -> int:
        """Columns of the block table that the batch's rows reach."""
        return int(batch.positions.max(initial=-1)) // self._spec.tokens_per_block + 1

    def _check(self, batch: RaggedBatch) -> None:
        spec = self._spec
        if batch.num_rows > spec.max_num_tokens or batch.num_requests > spec.num_slots:
            raise InvalidArgumentError(
                f"a pass of {batch.num_rows} rows of {batch.num_requests} requests, the engine allows "
                f"{spec.max_num_tokens} rows of {spec.num_slots}"
            )
        if batch.num_rows and (batch.token_ids.min() < 0 or batch.token_ids.max() >= spec.vocab_size):
            raise InvalidArgumentError(f"token_ids are not all within 0 to {spec.vocab_size - 1}")
        if batch.block_table.shape[1] > self.max_blocks_per_seq:
            raise InvalidArgumentError(
                f"block_table has {batch.block_table.shape[1]} blocks per request, max_seq_len "
                f"{spec.max_seq_len} needs {self.max_blocks_per_seq}"
            )
        # Kernels skip invalid blocks, so a wrong id would silently give wrong results.
        if batch.num_rows:
            last = batch.positions[batch.cu_rows[1:] - 1] // spec.tokens_per_block
            table = batch.block_table[:, : self._num_blocks(batch)][batch.slots]
            is_used = np.arange(table.shape[1]) <= last[:, None]
            if (is_used & ((table < 0) | (table >= spec.num_kv_blocks))).any():
                raise InvalidArgumentError(f"block ids are not all within 0 to {spec.num_kv_blocks - 1}")
        parents = batch.branch_parents
        if parents is None:
            return
        num_parents, num_rows = batch.num_requests - parents.size, np.diff(batch.cu_rows)
        if parents.size > spec.max_num_branches or (num_rows[num_parents:] != 1).any():
            raise InvalidArgumentError(
                f"branches have {num_rows[num_parents:].tolist()} rows, the engine allows "
                f"{spec.max_num_branches} branches of one row"
            )
        if parents.size and (parents.min() < 0 or parents.max() >= num_parents or (np.diff(parents) < 0).any()):
            raise InvalidArgumentError(
                f"branch_parents is {parents.tolist()}, it must be ascending and within 0 to {num_parents - 1}"
            )


def _fill_first_branch(batch: RaggedBatch, out: Int32Array) -> None:
    parents = np.zeros(0, np.int32) if batch.branch_parents is None else batch.branch_parents
    num_parents = batch.num_requests - parents.size
    out[:num_parents] = num_parents + np.searchsorted(parents, np.arange(num_parents))
    out[num_parents:] = batch.num_requests
