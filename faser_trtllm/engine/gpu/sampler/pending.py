"""A head's steps over drafts that are pending: it goes on from its own outputs, and nothing is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.sampler.call import DraftCall
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.ops.arrays import int32_at

if TYPE_CHECKING:
    from torch import Tensor


class PendingSteps:
    """Those of one draft call: requests with fewer pending drafts join later, so that all end with the last step."""

    def __init__(self, runtime: Runtime, max_batch_size: int, max_draft_len: int) -> None:
        self._shape = (max_draft_len, 3, -(-max_batch_size // 4) * 4)
        self._staging = Staging(runtime, int(np.prod(self._shape)))

    def upload(self, call: DraftCall) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The steps of a call's requests -> newest, known and remaining of each, as take_step has them."""
        num_steps = int(call.pending.max(initial=0))
        if not num_steps:
            return
        filled = self._staging.fill().reshape(self._shape)
        filled[:num_steps] = 0
        addresses = call.sampling["tokens"][call.slots]
        columns = (addresses, call.known, call.pending)
        for i, (address, count, drafts) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            steps = slice(num_steps - drafts, num_steps)
            filled[steps, 0, i] = int32_at(address, count)[count - drafts :]
            filled[steps, 1, i] = np.arange(count - drafts, count) + 1
            filled[steps, 2, i] = 1
        self._staging.send(num_steps * self._shape[1] * self._shape[2])
        for step in self._staging.device.view(self._shape)[:num_steps]:
            yield step[0], step[1], step[2]
