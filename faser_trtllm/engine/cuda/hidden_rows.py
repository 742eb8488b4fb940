"""Hidden rows of some of the target's layers, kept on the device for a draft head by KV block and offset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.runtime import Runtime

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Int64Array = npt.NDArray[np.int64]


class HiddenRows:
    """The target's hidden rows in `tensor` [KV tokens + 2, layers * hidden_size], of the target's dtype.

    The last two rows are a spare one that dummies write to, and one of zeros. A row holds the inputs of the listed
    layers, in order; layer num_layers stands for the output of the last layer. The target's passes write the tensor and
    the head's passes read it, at indices that each upload of a batch computes.
    """

    def __init__(
        self,
        runtime: Runtime,
        layers: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
        *,
        num_blocks: int,
        tokens_per_block: int,
    ) -> None:
        """layers: ascending. hidden_size, dtype: the target's. num_blocks: KV blocks of requests and branches."""
        import torch

        self._layers = tuple(layers)
        self._hidden_size = hidden_size
        self._tokens_per_block = tokens_per_block
        self._num_tokens = num_blocks * tokens_per_block
        shape = (self._num_tokens + 2, len(self._layers) * hidden_size)
        self.tensor = torch.zeros(shape, dtype=dtype, device=runtime.device)

    def keep(self, layer: int, rows: Tensor, hidden: Tensor) -> None:
        """Write hidden [n, hidden_size], the input of a layer, to `rows` int64 [n], if the layer is kept."""
        if layer in self._layers:
            first = self._layers.index(layer) * self._hidden_size
            self.tensor[:, first : first + self._hidden_size].index_copy_(0, rows, hidden)

    def copy(self, ops: Ops, copies: Tensor) -> None:
        """See Decoder.copy_kv."""
        size = self._tokens_per_block
        ops.copy_kv(copies, self.tensor[: self._num_tokens].view(1, self._num_tokens // size, 1, size, -1))

    def own_rows(self, batch: RaggedBatch, out: Int64Array) -> None:
        """Fill in each token's own row, for targets and block drafters (see TokenRows); dummies get the spare row."""
        out[batch.num_rows :] = self._num_tokens
        out[: batch.num_rows] = self._rows(batch, batch.positions)

    def rows_before(self, batch: RaggedBatch, out: Int64Array) -> None:
        """Fill in the row of the position before, for other heads; position 0 and dummies get the row of zeros."""
        out[batch.num_rows :] = self._num_tokens + 1
        found = self._rows(batch, np.maximum(batch.positions - 1, 0))
        out[: batch.num_rows] = np.where(batch.positions > 0, found, self._num_tokens + 1)

    def _rows(self, batch: RaggedBatch, positions: npt.NDArray[np.int32]) -> Int64Array:
        slots, size = np.repeat(batch.slots, np.diff(batch.cu_rows)), self._tokens_per_block
        rows: Int64Array = batch.block_table[slots, positions // size].astype(np.int64) * size + positions % size
        return rows
