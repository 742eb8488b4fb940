"""A ragged batch in device memory, at addresses that captured graphs keep."""

from __future__ import annotations

import numpy as np

from faser_trtllm.builder.network.inputs import plugin_inputs
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.cuda_runtime import Runtime
from faser_trtllm.engine.cuda_staging import Staging
from faser_trtllm.errors import InvalidArgumentError


class DeviceBatch:
    """The inputs of a pass, int32: cu_q_lens [max_batch_size + 1], kv_lens [max_batch_size], block_table
    [max_batch_size, max_blocks_per_seq], token_ids, positions and logit_rows [max_num_tokens].

    Requests that are not there have no rows; rows behind the last request's are dummies, which write nothing.
    """

    def __init__(self, runtime: Runtime, spec: EngineSpec) -> None:
        batch, rows = spec.max_batch_size, spec.max_num_tokens
        self._spec = spec
        self.max_blocks_per_seq = -(-spec.max_seq_len // spec.tokens_per_block)
        sizes = (batch + 1, batch, batch * self.max_blocks_per_seq, rows, rows, rows)
        ends = np.cumsum([-(-size // 4) * 4 for size in sizes]).tolist()  # sections begin at multiples of 16 bytes
        self._sections = [(end - -(-size // 4) * 4, size) for end, size in zip(ends, sizes, strict=True)]
        self._staging = Staging(runtime, ends[-1])
        views = [self._staging.device[start : start + size] for start, size in self._sections]
        self.cu_q_lens, self.kv_lens, table, self.token_ids, self.positions, self.logit_rows = views
        self.block_table = table.view(batch, self.max_blocks_per_seq)

    def clear(self) -> None:
        """No requests: a pass then computes dummies and writes no KV."""
        self._staging.device.zero_()

    def upload(self, batch: RaggedBatch) -> None:
        """Copy a batch to the device, asynchronously. InvalidArgumentError for one that cannot be."""
        self._check(batch)
        inputs = plugin_inputs(batch, self._spec.max_seq_len).arrays
        filled = self._staging.fill()
        sections = [filled[start : start + size] for start, size in self._sections]
        cu_q_lens, kv_lens, table, token_ids, positions, logit_rows = sections
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
        self._staging.send(self._staging.size)

    def _check(self, batch: RaggedBatch) -> None:
        spec = self._spec
        if batch.num_rows > spec.max_num_tokens or batch.num_requests > spec.max_batch_size:
            raise InvalidArgumentError(
                f"a pass of {batch.num_rows} rows of {batch.num_requests} requests, the engine allows "
                f"{spec.max_num_tokens} rows of {spec.max_batch_size}"
            )
        if batch.num_rows and (batch.token_ids.min() < 0 or batch.token_ids.max() >= spec.vocab_size):
            raise InvalidArgumentError(f"token_ids are not all within 0 to {spec.vocab_size - 1}")
        if batch.block_table.shape[1] > self.max_blocks_per_seq:
            raise InvalidArgumentError(
                f"block_table has {batch.block_table.shape[1]} blocks per request, max_seq_len "
                f"{spec.max_seq_len} needs {self.max_blocks_per_seq}"
            )
        # The kernels leave out what is in no block, so a wrong id would be a wrong result and no error.
        lens = batch.positions[batch.cu_rows[1:] - 1] // spec.tokens_per_block if batch.num_rows else ()
        for slot, last in zip(batch.slots.tolist(), lens, strict=False):
            used = batch.block_table[slot, : last + 1]
            if used.min() < 0 or used.max() >= spec.num_blocks:
                raise InvalidArgumentError(f"block ids are not all within 0 to {spec.num_blocks - 1}")
