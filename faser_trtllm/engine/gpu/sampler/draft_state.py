"""The draft loop's device state between steps, at fixed addresses for captured graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.gpu.batch import PassInputs
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.sampler.table import ADDRESSES
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.cuda.sample import Draws

if TYPE_CHECKING:
    from torch import Tensor

Int32Array = npt.NDArray[np.int32]

_ENTRY_INTS = SAMPLING_DTYPE.itemsize // 4


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
        batch, device = spec.max_batch_size, runtime.device
        # The block table is last, so that only the rows of a call's requests are sent.
        sizes = (batch * _ENTRY_INTS, *[batch] * 3, 1, max_draft_len * batch, batch * max_blocks_per_seq)
        ends = np.cumsum([-(-size // 4) * 4 for size in sizes]).tolist()
        self._sections = [(end - -(-size // 4) * 4, size) for end, size in zip(ends, sizes, strict=True)]
        self._staging = Staging(runtime, ends[-1])
        views = [self._staging.device[start : start + size] for start, size in self._sections]
        entries, known, remaining, slots, step, tokens, table = views
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

    def clear(self) -> None:
        """Remove all requests: a step then draws and writes nothing."""
        self._staging.device.zero_()
        self.draws.known.fill_(1)

    def without_edits(self, entries: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Entries of requests without edits, for upload(): nothing that they point to is read."""
        own: npt.NDArray[np.void] = entries.copy()
        for name in (*ADDRESSES, "num_end_ids", "num_bias", "num_bad_words"):
            own[name] = 0
        own["tokens"] = self._staging.device.data_ptr()  # kernels refuse a request without tokens
        return own

    def upload(
        self,
        entries: npt.NDArray[np.void],
        slots: Int32Array,
        known: Int32Array,
        wanted: Int32Array,
        block_table: Int32Array,
    ) -> None:
        """Load the requests of a call, in the order of their logits. entries: with device addresses, or null ones.
        block_table [n, any number of columns that their tokens fit]."""
        n = slots.size
        filled = self._staging.fill()
        first_row, _ = self._sections[-1]
        filled[:first_row] = 0
        sections: list[Any] = [filled[start : start + size] for start, size in self._sections]
        place, host_known, remaining, host_slots, _, tokens, table = sections
        place[: n * _ENTRY_INTS] = entries.view(np.int32)
        host_known[:] = 1
        host_known[:n], remaining[:n], host_slots[:n] = known, wanted, slots
        table.reshape(self._block_table.shape)[:n, : block_table.shape[1]] = block_table
        tokens[:] = -1  # steps that are not run have drawn nothing
        self._staging.send(first_row + n * self._block_table.shape[1])

    def give_to(self, batch: PassInputs, ops: Ops, size: int) -> None:
        """Set up the next pass: one row per request, its newest token."""
        draws = self.draws
        batch.take_step(ops, draws.newest[:size], draws.known[:size], draws.remaining[:size], self._block_table[:size])

    def give_tokens(self, batch: PassInputs, ops: Ops, size: int, step: tuple[Tensor, Tensor, Tensor]) -> None:
        """As give_to, of newest, known and remaining that are given."""
        newest, known, remaining = (values[:size] for values in step)
        batch.take_step(ops, newest, known, remaining, self._block_table[:size])

    def read(
        self, count: int, num_requests: int
    ) -> tuple[Int32Array, npt.NDArray[np.float32], Int32Array, Int32Array | None]:
        """Tokens, margins [count, num_requests], candidates [..., NUM_CANDIDATES] and, if kept, runners-up of the first
        steps; waits."""
        for host, output in zip(self._host, self._outputs, strict=True):
            host[:count].copy_(output[:count], non_blocking=True)
        self._runtime.wait()
        tokens, margins, candidates, *others = (host.numpy()[:count, :num_requests] for host in self._host)
        return tokens, margins, candidates, others[0] if others else None
