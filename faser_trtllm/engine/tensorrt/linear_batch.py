"""The inputs of a pass over linear KV caches (native attention), in device memory at fixed addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from faser_trtllm.builder.network.inputs import native_inputs
from faser_trtllm.builder.network.options import NetworkOptions
from faser_trtllm.core.batch import Int32Array, RaggedBatch
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.gpu.batch import TokenRows
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.ops.transfer.fill_inputs import check_size, check_tokens

if TYPE_CHECKING:
    from torch import Tensor


_SECTIONS = [
    "cu_q_lens",
    "kv_lens",
    "write_idx",
    "token_ids",
    "positions",
    "logit_rows",
    "unpad_idx",
    "token_rows",
    "pad_idx",
]


class LinearBatch:
    """PassInputs (engine/gpu/batch.py) of networks whose request b uses cache row b, so rows are sorted by cache row.

    More inputs, all int32: write_idx [num_slots], the cache position of each request's first row; pad_idx [num_slots,
    query_rows] and unpad_idx [rows], which map between packed rows and attention's padded ones. num_slots: cache rows.
    """

    def __init__(
        self, runtime: Runtime, spec: EngineSpec, options: NetworkOptions, token_rows: TokenRows | None = None
    ) -> None:
        """token_rows: see DeviceBatch (engine/gpu/batch.py)."""
        import torch

        self._token_rows = token_rows
        slots, rows = options.max_batch_size, spec.max_num_tokens
        self._spec = spec
        self._options = options
        # pad_idx, whose size depends on a pass's query rows, is last, so that only its used part is sent.
        kept, padded = 0 if token_rows is None else 2 * rows, slots * min(options.max_query_rows, rows)
        sizes = (slots + 1, slots, slots, rows, rows, rows, rows, kept, padded)
        ends = np.cumsum([-(-size // 4) * 4 for size in sizes]).tolist()  # sections begin at multiples of 16 bytes
        self._sections = [(end - -(-size // 4) * 4, size) for end, size in zip(ends, sizes, strict=True)]
        self._staging = Staging(runtime, ends[-1])
        views = [self._staging.device[start : start + size] for start, size in self._sections]
        self.cu_q_lens, self.kv_lens, self.write_idx, self.token_ids, self.positions, self.logit_rows = views[:6]
        self.unpad_idx, by_token, self._pad_idx = views[6:]
        self.token_rows = by_token.view(torch.int64)
        self.row_of: Int32Array | None = None
        self._iota = torch.arange(max(slots, spec.max_batch_size), dtype=torch.int32, device=runtime.device)

    def pad_idx(self, query_rows: int) -> Tensor:
        slots = self._options.max_batch_size
        return self._pad_idx[: slots * query_rows].view(slots, query_rows)

    def clear(self) -> None:
        self._staging.device.zero_()
        self.write_idx[-1] = self._options.max_seq_len  # dummies belong to the last cache row, past its end

    def upload(self, batch: RaggedBatch, rows: int, query_rows: int) -> None:
        check_size(batch, self._spec.max_num_tokens, self._spec.max_batch_size)
        check_tokens(batch, self._spec.vocab_size)
        options = self._options
        inputs = native_inputs(batch, batch.block_table[batch.slots, 0], options.max_batch_size, self._spec.max_seq_len)
        arrays = padded_arrays(inputs.arrays, rows, query_rows, options.max_seq_len)
        self.row_of = np.empty(batch.num_rows, np.int32)
        self.row_of[inputs.order] = np.arange(batch.num_rows, dtype=np.int32)
        filled = self._staging.fill()
        end = 0
        token_rows = np.zeros(self.token_rows.shape[0], np.int64)
        if self._token_rows is not None:
            self._token_rows(batch, token_rows)
            token_rows[: batch.num_rows] = token_rows[inputs.order]
        arrays["token_rows"] = token_rows.view(np.int32)
        for name, (start, size) in zip(_SECTIONS, self._sections, strict=True):
            values = arrays[name].reshape(-1)
            end = start + values.size
            filled[start:end], filled[end : start + size] = values, 0
        self._staging.send(end)

    def take_step(self, ops: Ops, newest: Tensor, known: Tensor, remaining: Tensor, block_table: Tensor) -> None:
        import torch

        n, slots, goes_on = newest.shape[0], self._options.max_batch_size, remaining > 0
        cache_rows = torch.where(goes_on, block_table[:, 0], slots).long()
        order = torch.argsort(cache_rows, stable=True)
        place = torch.zeros_like(order).scatter_(0, order, self._iota[:n].long())
        self.token_ids[:n].copy_(newest[order])
        self.positions[:n].copy_(torch.where(goes_on, known - 1, 0)[order])
        self.logit_rows[:n].copy_(place)
        self.unpad_idx[:n].copy_(torch.where(goes_on, cache_rows, 0)[order])
        # By cache row; the extra entry is for requests that have ended.
        lens = torch.zeros(slots + 1, dtype=torch.int32, device=known.device)
        lens.scatter_(0, cache_rows, torch.where(goes_on, known, 0))
        lens, has_row = lens[:slots], lens[:slots] > 0
        self.kv_lens.copy_(lens)
        self.write_idx.copy_(torch.where(has_row, lens - 1, 0))
        ends = has_row.int().cumsum(0)
        self.cu_q_lens[1:].copy_(ends)
        self.pad_idx(1)[:, 0].copy_((ends - 1).clamp(min=0))
        # Dummies belong to the last cache row: after its own rows, or past the cache.
        self.cu_q_lens[-1:].fill_(n)
        self.write_idx[-1:].copy_(torch.where(has_row[-1:], lens[-1:] - 1, self._options.max_seq_len))


def padded_arrays(arrays: dict[str, Int32Array], rows: int, query_rows: int, max_seq_len: int) -> dict[str, Int32Array]:
    """Return native_inputs padded to `rows` rows, and to query_rows rows per request.

    A dummy row has token 0 and belongs to the last cache row, after its own rows or, if it is idle, past the cache, so
    that it overwrites nothing.
    """
    num_slots, width = arrays["pad_idx"].shape
    pad_idx = np.zeros((num_slots, query_rows), np.int32)
    pad_idx[:, :width] = arrays["pad_idx"]
    slot, place = np.divmod(arrays["unpad_idx"], width)
    cu_q_lens, write_idx = arrays["cu_q_lens"].copy(), arrays["write_idx"].copy()
    if rows > arrays["positions"].size:
        if cu_q_lens[-1] == cu_q_lens[-2]:
            write_idx[-1] = max_seq_len
        cu_q_lens[-1] = rows
    padded = {name: _padded(arrays[name], rows) for name in ("token_ids", "positions", "logit_rows")}
    unpad_idx = _padded((slot * query_rows + place).astype(np.int32), rows)
    return (
        arrays
        | padded
        | {
            "cu_q_lens": cu_q_lens,
            "write_idx": write_idx,
            "pad_idx": pad_idx,
            "unpad_idx": unpad_idx,
        }
    )


def _padded(array: Int32Array, size: int) -> Int32Array:
    padded = np.zeros(size, np.int32)
    padded[: array.size] = array
    return padded
