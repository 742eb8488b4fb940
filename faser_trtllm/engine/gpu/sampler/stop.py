"""When drafting ends early, decided on the device: core/decision.py DraftStop, as ops/draft_stop.py has it."""

from __future__ import annotations

import numpy as np

from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.ops.arrays import Float64Array, Int32Array
from faser_trtllm.ops.cuda.sample import StopTables


class StopRule:
    """The rule of one draft call, and each request's survival so far. Fixed addresses, for captured graphs.

    tables: ops/cuda/sample.py, whose advance() decides.
    """

    def __init__(self, runtime: Runtime, max_batch_size: int, max_draft_len: int) -> None:
        import torch

        self._runtime = runtime
        self._width = max_draft_len + 1
        shapes = (
            (2 * max_batch_size,),  # survival, float64
            (max_batch_size,),  # mode
            (max_batch_size,),  # pending drafts
            (4, NUM_MODES, self._width),  # slope, intercept, prior, spread
            (self._width,),  # row_price
            (max_batch_size + 1,),  # step_price
        )
        sizes = [int(np.prod(shape)) for shape in shapes]
        ends = np.cumsum([-(-size // 4) * 4 for size in sizes]).tolist()
        starts = [0, *ends[:-1]]
        self._sections = list(zip(starts, sizes, strict=True))
        self._staging = Staging(runtime, ends[-1])
        views = [self._staging.device[start : start + size] for start, size in self._sections]
        survival, modes, pending, tables, row_price, step_price = views
        self.tables = StopTables(
            modes,
            tables.view(torch.float32).view(4, NUM_MODES, self._width),
            row_price.view(torch.float32),
            step_price.view(torch.float32),
            pending,
            survival.view(torch.float64),
            torch.zeros(1, dtype=torch.int32, device=runtime.device),
        )
        self._host_num_going = runtime.host_tensor((1,), torch.int32)

    def upload(
        self, stop: DraftStop | None, modes: Int32Array, num_pending: Int32Array, survival: Float64Array
    ) -> None:
        """For a call of n requests, arrays [n]: their drafts that are pending already, and the survival of those. stop:
        None lets everybody go on."""
        filled = self._staging.fill()
        filled[:] = 0
        host_survival, mode, pending, tables, row_price, step_price = (
            filled[start : start + size] for start, size in self._sections
        )
        n = modes.size
        host_survival.view(np.float64)[:n] = survival
        mode[:n], pending[:n] = modes, num_pending
        floats = tables.view(np.float32).reshape(4, NUM_MODES, self._width)
        if stop is None:
            step_price.view(np.float32)[:] = -np.inf
        else:
            for table, values in zip(floats, (stop.slope, stop.intercept, stop.prior, stop.spread), strict=True):
                table[:, : values.shape[1]] = values
            row_price.view(np.float32)[: stop.row_price.size] = stop.row_price
            known = min(stop.step_price.size, step_price.size)
            step_price.view(np.float32)[:known] = stop.step_price[:known]
        self._staging.send(self._staging.size)

    def num_going(self) -> int:
        """Requests that draft on; waits for the step."""
        self._host_num_going.copy_(self.tables.num_going, non_blocking=True)
        self._runtime.wait()
        return int(self._host_num_going[0])
