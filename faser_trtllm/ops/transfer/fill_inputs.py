"""Fill the inputs of a pass natively from a batch, as one upload for an engine with its own memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.batch import Int32Array, RaggedBatch
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.native.structures import FaserPassLimits
from faser_trtllm.ops.arrays import address_of

SECTIONS = ("cu_q_lens", "kv_lens", "token_ids", "positions", "logit_rows", "first_branch", "block_table")


class PassLimits(FaserPassLimits):
    """The limits of a batch, and the offset of each of SECTIONS in the upload: starts int64 [7], with -1 for
    first_branch in an engine without branches. max_num_requests and num_blocks include branches."""

    def __init__(self, starts: Sequence[int], **fields: int) -> None:
        """fields: all of FaserPassLimits."""
        super().__init__(**fields)
        self.starts = np.array(starts, np.int64)
        self.address, self.starts_address = ctypes.addressof(self), address_of(self.starts, np.int64)


def fill_inputs(batch: RaggedBatch, limits: PassLimits, out: Int32Array) -> None:
    """Write the sections of a batch to `out`, at limits.starts: cu_q_lens [max_num_requests + 1], kv_lens
    [max_num_requests], token_ids, positions and logit_rows [max_num_rows], first_branch [max_num_requests + 1], and of
    block_table [max_num_requests, max_blocks_per_seq] the requests' rows as far as the batch reaches. Unused entries
    are 0, but cu_q_lens and first_branch repeat their last value. Raises InvalidArgumentError for an invalid batch."""
    parents = batch.branch_parents
    num_branches = 0 if parents is None else parents.size
    status = native.library().faser_fill_inputs(
        limits.address,
        batch.slots.size,
        batch.token_ids.size,
        native.address_of_buffer(batch.slots),
        native.address_of_buffer(batch.cu_rows),
        native.address_of_buffer(batch.token_ids),
        native.address_of_buffer(batch.positions),
        batch.logit_rows.size,
        native.address_of_buffer(batch.logit_rows),
        native.address_of_buffer(batch.block_table),
        *batch.block_table.shape,
        native.address_of_buffer(parents) if parents is not None and num_branches else None,
        num_branches,
        native.address_of_buffer(out),
        limits.starts_address,
    )
    if status != native.FASER_OK:
        check_batch(batch, limits)
        native.check(status, f"filling the inputs of {batch.num_rows} rows of {batch.num_requests} requests")


def check_batch(batch: RaggedBatch, limits: PassLimits) -> None:
    """Raise InvalidArgumentError for a batch outside the limits. Kernels skip invalid blocks, so a wrong id would
    silently give wrong results."""
    check_size(batch, limits.max_num_rows, limits.max_num_requests)
    if batch.num_requests and (batch.slots.min() < 0 or batch.slots.max() >= batch.block_table.shape[0]):
        raise InvalidArgumentError(f"slots are not all within 0 to {batch.block_table.shape[0] - 1}")
    check_tokens(batch, limits.vocab_size)
    if batch.block_table.shape[1] > limits.max_blocks_per_seq:
        raise InvalidArgumentError(
            f"block_table has {batch.block_table.shape[1]} blocks per request, max_seq_len "
            f"{limits.max_seq_len} needs {limits.max_blocks_per_seq}"
        )
    check_positions(batch, limits.max_seq_len)
    if batch.num_rows:
        last = batch.positions[batch.cu_rows[1:] - 1] // limits.tokens_per_block
        table = batch.block_table[batch.slots]
        is_used = np.arange(table.shape[1]) <= last[:, None]
        is_wrong = (table < 0) | (table >= limits.num_blocks)
        if (last >= table.shape[1]).any() or (is_used & is_wrong).any():
            raise InvalidArgumentError(f"block ids are not all within 0 to {limits.num_blocks - 1}")
    parents = batch.branch_parents
    if parents is None:
        return
    num_parents, num_rows = batch.num_requests - parents.size, np.diff(batch.cu_rows)
    if parents.size > limits.max_num_branches or (num_rows[num_parents:] != 1).any():
        raise InvalidArgumentError(
            f"branches have {num_rows[num_parents:].tolist()} rows, the engine allows "
            f"{limits.max_num_branches} branches of one row"
        )
    if parents.size and (parents.min() < 0 or parents.max() >= num_parents or (np.diff(parents) < 0).any()):
        raise InvalidArgumentError(
            f"branch_parents is {parents.tolist()}; it must be ascending and within 0 to {num_parents - 1}"
        )


def check_size(batch: RaggedBatch, max_num_rows: int, max_num_requests: int) -> None:
    """Raise InvalidArgumentError for a batch of more rows or requests."""
    if batch.num_rows > max_num_rows or batch.num_requests > max_num_requests:
        raise InvalidArgumentError(
            f"a pass of {batch.num_rows} rows of {batch.num_requests} requests, the engine allows "
            f"{max_num_rows} rows of {max_num_requests}"
        )


def check_tokens(batch: RaggedBatch, vocab_size: int) -> None:
    """Raise InvalidArgumentError for a token that does not exist."""
    if batch.num_rows and (batch.token_ids.min() < 0 or batch.token_ids.max() >= vocab_size):
        raise InvalidArgumentError(f"token_ids are not all within 0 to {vocab_size - 1}")


def check_positions(batch: RaggedBatch, max_seq_len: int) -> None:
    """Raise InvalidArgumentError unless each request's rows are consecutive and below max_seq_len."""
    counts = np.diff(batch.cu_rows)
    if counts.size and counts.min() < 1:
        raise InvalidArgumentError(f"cu_rows is {batch.cu_rows.tolist()}, every request must have rows")
    firsts = np.repeat(batch.positions[batch.cu_rows[:-1]] - batch.cu_rows[:-1], counts)
    if not np.array_equal(firsts + np.arange(batch.num_rows), batch.positions):
        raise InvalidArgumentError(f"positions are {batch.positions.tolist()}, a request's rows must be consecutive")
    if batch.num_rows and (batch.positions.min() < 0 or batch.positions.max() >= max_seq_len):
        raise InvalidArgumentError(
            f"positions reach from {batch.positions.min()} to {batch.positions.max()}, allowed is 0 to "
            f"{max_seq_len - 1}"
        )
