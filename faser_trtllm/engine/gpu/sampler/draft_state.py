"""The draft loop's device state between steps, at fixed addresses for captured graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.gpu.batch import PassInputs
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.sampler.call import DraftCall
from faser_trtllm.engine.gpu.sampler.edits import DraftEdits
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.ops.arrays import SAMPLING_DTYPE, Float64Array
from faser_trtllm.ops.cuda.sample import Draws, StopTables
from faser_trtllm.ops.device.pack_sampling import ENTRY_INTS, SamplingPacker
from faser_trtllm.ops.draft_stop import NativeStop, pending_survival

if TYPE_CHECKING:
    from torch import Tensor

Int32Array = npt.NDArray[np.int32]


class DraftState:
    """The requests of one draft call and what each step drew. Of at most max_batch_size.

    draws: ops/cuda/sample.py.
    """

    def __init__(
        self,
        runtime: Runtime,
        spec: EngineSpec,
        max_draft_len: int,
        max_blocks_per_seq: int,
        probs: Tensor,
        keeps_runners_up: bool,
    ) -> None:
        """probs: of the draws."""
        import torch

        self._runtime = runtime
        self._width = max_draft_len + 1
        batch, device = spec.max_batch_size, runtime.device
        shapes = (
            (batch * ENTRY_INTS,),
            *[(batch,)] * 5,  # known, remaining, slots, modes, pending
            (1,),  # step
            (max_draft_len * batch,),  # tokens
            (2 * batch,),  # survival, float64
            (4 * NUM_MODES * self._width,),  # slope, intercept, prior, spread
            (self._width,),  # row_price
            (batch + 1,),  # step_price
            (batch * max_blocks_per_seq,),  # last, so that only the rows of a call's requests are sent
        )
        sizes = [size for (size,) in shapes]
        ends = np.cumsum([-(-size // 4) * 4 for size in sizes]).tolist()
        self._sections = [(end - -(-size // 4) * 4, size) for end, size in zip(ends, sizes, strict=True)]
        self._staging = Staging(runtime, ends[-1])
        views = [self._staging.device[start : start + size] for start, size in self._sections]
        (
            entries,
            known,
            remaining,
            slots,
            modes,
            pending,
            step,
            tokens,
            survival,
            tables,
            row_price,
            step_price,
            table,
        ) = views
        self._block_table = table.view(batch, max_blocks_per_seq)
        shape = (max_draft_len, batch)
        tokens = tokens.view(shape)
        margins = torch.zeros(shape, dtype=torch.float32, device=device)
        candidates = torch.zeros((*shape, NUM_CANDIDATES), dtype=torch.int32, device=device)
        runners_up = torch.zeros(shape, dtype=torch.int32, device=device) if keeps_runners_up else None
        self._outputs = (tokens, margins, candidates, *(() if runners_up is None else (runners_up,)))
        self._host = [runtime.host_tensor(tuple(output.shape), output.dtype) for output in self._outputs]
        self.draws = Draws(
            entries=entries.view(torch.uint8).view(batch, SAMPLING_DTYPE.itemsize),
            known=known,
            remaining=remaining,
            slots=slots,
            newest=torch.zeros(batch, dtype=torch.int32, device=device),
            step=step,
            tokens=tokens,
            margins=margins,
            candidates=candidates,
            probs=probs,
            runners_up=runners_up,
        )
        self.stop = StopTables(
            modes,
            tables.view(torch.float32).view(4, NUM_MODES, self._width),
            row_price.view(torch.float32),
            step_price.view(torch.float32),
            pending,
            survival.view(torch.float64),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        self._host_num_going = runtime.host_tensor((1,), torch.int32)
        self._packer = SamplingPacker(spec.vocab_size)
        self._native_stop = NativeStop(batch)
        self._none_pending = np.zeros(batch, np.int32)

    def clear(self) -> None:
        """Remove all requests: a step then draws and writes nothing."""
        self._staging.device.zero_()
        self.draws.known.fill_(1)

    def upload(self, call: DraftCall, block_table: Int32Array, stop: DraftStop | None, edits: DraftEdits) -> bool:
        """Load the requests of a call, in the order of their logits -> whether some edit their logits; `edits` has what
        those read. block_table [n, any number of columns that their tokens fit]. stop: None lets everybody go on."""
        n = call.slots.size
        filled = self._staging.fill()
        first_row, _ = self._sections[-1]
        filled[:first_row] = 0
        sections = [filled[start : start + size] for start, size in self._sections]
        place, known, remaining, slots, modes, pending, _, tokens, survival, *rule, table = sections
        none, at = self._none_pending[:n], self._staging.device.data_ptr()
        packed = self._packer.pack(call.sampling, call.slots, call.known, none, place[: n * ENTRY_INTS], at)
        if packed.is_edited:
            place[: n * ENTRY_INTS] = edits.upload(call)
        known[:] = 1
        known[:n], remaining[:n], slots[:n] = call.known, call.wanted, call.slots
        modes[:n], pending[:n] = call.modes, call.pending
        tokens[:] = -1  # steps that are not run have drawn nothing
        self._fill_stop(call, stop, survival.view(np.float64)[:n], rule)
        table.reshape(self._block_table.shape)[:n, : block_table.shape[1]] = block_table
        self._staging.send(first_row + n * self._block_table.shape[1])
        return packed.is_edited

    def num_going(self) -> int:
        """Requests that draft on, as the stop rule has it; waits for the step."""
        self._host_num_going.copy_(self.stop.num_going, non_blocking=True)
        self._runtime.wait()
        return int(self._host_num_going[0])

    def give_to(self, batch: PassInputs, ops: Ops, size: int) -> None:
        """Set up the next pass: one row per request, its newest token."""
        draws = self.draws
        batch.take_step(ops, draws.newest[:size], draws.known[:size], draws.remaining[:size], self._block_table[:size])

    def give_tokens(self, batch: PassInputs, ops: Ops, size: int, step: tuple[Tensor, Tensor, Tensor]) -> None:
        """As give_to, of newest, known and remaining that are given."""
        newest, known, remaining = (values[:size] for values in step)
        batch.take_step(ops, newest, known, remaining, self._block_table[:size])

    def read(self, count: int) -> tuple[Int32Array, npt.NDArray[np.float32], Int32Array, Int32Array | None]:
        """Of the first `count` steps: tokens, margins [count, max_batch_size], candidates [..., NUM_CANDIDATES] and, if
        kept, runners-up, in the order of the call's requests; waits."""
        for host, output in zip(self._host, self._outputs, strict=True):
            host[:count].copy_(output[:count], non_blocking=True)
        self._runtime.wait()
        tokens, margins, candidates, *others = (host.numpy()[:count] for host in self._host)
        return tokens, margins, candidates, others[0] if others else None

    def _fill_stop(
        self, call: DraftCall, stop: DraftStop | None, survival: Float64Array, rule: list[Int32Array]
    ) -> None:
        """survival [n]: of the drafts that are pending already."""
        survival[:] = 1.0
        tables, row_price, step_price = (section.view(np.float32) for section in rule)
        if stop is None:
            step_price[:] = -np.inf
            return
        if call.pending.any():
            address = self._native_stop.address(stop, self._width - 1)
            pending_survival(address, call.sampling, call.slots, call.num_tokens, call.pending, survival)
        floats = tables.reshape(4, NUM_MODES, self._width)
        for table, values in zip(floats, (stop.slope, stop.intercept, stop.prior, stop.spread), strict=True):
            table[:, : values.shape[1]] = values
        row_price[: stop.row_price.size] = stop.row_price
        count = min(stop.step_price.size, step_price.size)
        step_price[:count] = stop.step_price[:count]
