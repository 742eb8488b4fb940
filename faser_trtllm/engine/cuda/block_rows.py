"""The rows of drafted blocks on the device, and the engine's KV blocks for them, apart from the requests' own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.gpu.batch import DeviceBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def num_own_blocks(block_size: int, tokens_per_block: int) -> int:
    """Return the number of KV blocks that hold block_size tokens, wherever in the first block they begin."""
    return 1 + -(-(block_size - 1) // tokens_per_block)


class BlockRows:
    """Inputs of a pass over the blocks of up to max_batch_size requests, all int32 at fixed addresses.

    token_ids, positions [max_batch_size * block_size]: a request's last committed token and then mask tokens, at
    consecutive positions. block_table, cu_q_lens, kv_lens: see PagedKv. A row of the table has the request's own blocks
    up to the one before its last token's, and then blocks of the engine: num_blocks in all, from num_kv_blocks on.
    """

    def __init__(self, spec: EngineSpec, block: Mapping[str, Any], device: torch.device) -> None:
        """block: the `block` object of the engine file's header."""
        import torch

        self._block_size, self._tokens_per_block = block["block_size"], spec.tokens_per_block
        self._num_own = num_own_blocks(self._block_size, spec.tokens_per_block)
        options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        num_requests = spec.max_batch_size
        num_rows, self.num_blocks = num_requests * self._block_size, num_requests * self._num_own
        width = -(-(spec.max_seq_len + self._block_size - 1) // spec.tokens_per_block)
        self._places = torch.arange(self._block_size, **options)
        self._columns = torch.arange(width, **options)
        self._first_own = torch.arange(num_requests, **options) * self._num_own + spec.num_kv_blocks
        self.token_ids = torch.full((num_rows,), block["mask_token_id"], **options)
        self.positions = torch.zeros(num_rows, **options)
        self.cu_q_lens = torch.arange(num_requests + 1, **options) * self._block_size
        self.kv_lens = torch.full((num_requests,), self._block_size, **options)
        self.block_table = torch.zeros((num_requests, width), **options)

    def fill(self, batch: DeviceBatch, count: int) -> Tensor:
        """Set up blocks for the first `count` logit rows of a batch, each of which must be its request's last row.
        Return int32 [4, count], the copies into the engine's blocks (ops/cuda/copy_kv.py)."""
        import torch

        rows, size = batch.logit_rows[:count], self._tokens_per_block
        last = batch.positions.index_select(0, rows)
        # Unused entries of the batch may have any value that is in range.
        requests = torch.searchsorted(batch.cu_q_lens[1:], rows, right=True).clamp_(max=batch.kv_lens.shape[0] - 1)
        theirs = batch.block_table.index_select(0, requests)
        column, first_own = last // size, self._first_own[:count]
        after = self._columns - column[:, None]
        own = first_own[:, None] + after.clamp(max=self._num_own - 1)
        width = theirs.shape[1]
        table = self.block_table[:count]
        table.copy_(own)
        table[:, :width] = torch.where(after[:, :width] < 0, theirs, own[:, :width])
        self.token_ids.view(-1, self._block_size)[:count, 0] = batch.token_ids.index_select(0, rows)
        self.positions.view(-1, self._block_size)[:count] = last[:, None] + self._places
        self.kv_lens[:count] = last + self._block_size
        source = theirs.gather(1, column.long()[:, None])[:, 0]
        return torch.stack((source, first_own, torch.zeros_like(last), last % size))
