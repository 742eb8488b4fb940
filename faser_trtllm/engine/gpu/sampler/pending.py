"""Steps in which a head runs its pending drafts. It continues from its own outputs, and draws nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.sampler.call import DraftCall
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.ops.requests.fill_rows import RowFiller

if TYPE_CHECKING:
    from torch import Tensor


class PendingSteps:
    """The steps of a draft call. Requests with fewer pending drafts start later, so that all end with the same step."""

    def __init__(self, runtime: Runtime, max_batch_size: int, max_draft_len: int) -> None:
        self._shape = (max_draft_len, 3, -(-max_batch_size // 4) * 4)
        self._staging = Staging(runtime, int(np.prod(self._shape)))
        no_blocks = np.zeros((max_batch_size, 0), np.int32)
        self._rows = RowFiller(max_batch_size, max_batch_size * max_draft_len, no_blocks)

    def upload(self, call: DraftCall) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield newest, known and remaining of each step, for take_step (ops/cuda/take_step.py)."""
        num_steps = int(call.pending.max(initial=0))
        if not num_steps:
            return
        filled = self._staging.fill().reshape(self._shape)
        filled[:num_steps] = 0
        found = np.flatnonzero(call.pending)
        slots, first, end = (column[found] for column in (call.slots, call.num_tokens, call.known))
        rows = self._rows.fill(call.sampling, slots, first, end, np.zeros(found.size, np.int32))
        requests = np.repeat(found, call.pending[found])
        steps = num_steps + rows.positions - call.known[requests]
        filled[steps, 0, requests] = rows.token_ids
        filled[steps, 1, requests] = rows.positions + 1
        filled[steps, 2, requests] = 1
        self._staging.send(num_steps * self._shape[1] * self._shape[2])
        for step in self._staging.device.view(self._shape)[:num_steps]:
            yield step[0], step[1], step[2]
