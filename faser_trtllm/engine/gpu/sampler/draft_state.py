"""The draft loop's device state between steps, at fixed addresses for captured graphs."""

from __future__ import annotations

from collections.abc import Mapping
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
from faser_trtllm.engine.gpu.sampler.upload import EntryUpload
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.cuda.accept import workspace_bytes
from faser_trtllm.ops.cuda.sample import Draws, StopTables
from faser_trtllm.ops.draft_stop import NativeStop, pending_survival
from faser_trtllm.ops.transfer.pack_sampling import ENTRY_INTS, SamplingPacker

if TYPE_CHECKING:
    from torch import Tensor

Int32Array = npt.NDArray[np.int32]


class DraftState:
    """The requests of a draft call, at most max_batch_size, its stop rule, and the tokens that each step drew.

    draws, stop: see ops/cuda/sample.py, whose advance() ends drafting by the rule of ops/draft_stop.py.
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
        """probs: see Draws.probs."""
        import torch

        self._runtime = runtime
        self._width = max_draft_len + 1
        batch, device = spec.max_batch_size, runtime.device
        sizes = {
            "entries": batch * ENTRY_INTS,
            **dict.fromkeys(("known", "remaining", "slots", "modes", "pending"), batch),
            "step": 1,
            "tokens": max_draft_len * batch,
            "survival": 2 * batch,  # float64
            "tables": 4 * NUM_MODES * self._width,  # slope, intercept, prior, spread
            "row_price": self._width,
            "step_price": batch + 1,
            "block_table": batch * max_blocks_per_seq,  # last: only the rows of a call's requests are sent
        }
        self._parts: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self._parts[name] = slice(end, end + size)
            end += -(-size // 4) * 4
        self._staging = Staging(runtime, end)
        parts = {name: self._staging.device[part] for name, part in self._parts.items()}
        self._block_table = parts["block_table"].view(batch, max_blocks_per_seq)
        shape = (max_draft_len, batch)
        tokens = parts["tokens"].view(shape)
        margins = torch.zeros(shape, dtype=torch.float32, device=device)
        candidates = torch.zeros((*shape, NUM_CANDIDATES), dtype=torch.int32, device=device)
        runners_up = torch.zeros(shape, dtype=torch.int32, device=device) if keeps_runners_up else None
        self._outputs = (tokens, margins, candidates, *(() if runners_up is None else (runners_up,)))
        num_bytes = workspace_bytes(batch, probs.shape[2])
        workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device) if num_bytes else None
        self._host = [runtime.host_tensor(tuple(output.shape), output.dtype) for output in self._outputs]
        self.draws = Draws(
            entries=parts["entries"].view(torch.uint8).view(batch, SAMPLING_DTYPE.itemsize),
            known=parts["known"],
            remaining=parts["remaining"],
            slots=parts["slots"],
            newest=torch.zeros(batch, dtype=torch.int32, device=device),
            step=parts["step"],
            tokens=tokens,
            margins=margins,
            candidates=candidates,
            probs=probs,
            runners_up=runners_up,
            workspace=workspace,
        )
        self.stop = StopTables(
            parts["modes"],
            parts["tables"].view(torch.float32).view(4, NUM_MODES, self._width),
            parts["row_price"].view(torch.float32),
            parts["step_price"].view(torch.float32),
            parts["pending"],
            parts["survival"].view(torch.float64),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        self._host_num_going = runtime.host_tensor((1,), torch.int32)
        self._packer = SamplingPacker(spec.vocab_size)
        self._edits = EntryUpload(runtime, spec.vocab_size, 4)  # small: few requests edit their logits
        self._native_stop = NativeStop(batch)
        self._none_pending = np.zeros(batch, np.int32)

    def clear(self) -> None:
        """Remove all requests, so that a step draws and writes nothing."""
        self._staging.device.zero_()
        self.draws.known.fill_(1)

    def upload(self, call: DraftCall, block_table: Int32Array, stop: DraftStop | None) -> bool:
        """Load the requests of a call in the order of their logits. Return True if some edit their logits.

        block_table [n, any number of columns]: the requests' blocks. stop: None lets all requests continue.
        """
        n, width = call.slots.size, self._block_table.shape[1]
        filled = self._staging.fill()
        first_row = self._parts["block_table"].start
        filled[:first_row] = 0
        parts = {name: filled[part] for name, part in self._parts.items()}
        entries = parts["entries"][: n * ENTRY_INTS]
        none, at = self._none_pending[:n], self._staging.device.data_ptr()
        packed = self._packer.pack(call.sampling, call.slots, call.known, none, entries, at)
        if packed.is_edited:
            # Entries with the tokens so far, and room for those that will be drawn.
            entries[:] = self._edits.send(call.sampling, call.slots, call.known, call.wanted).entries
        parts["known"][n:] = 1
        columns = {"known": call.known, "remaining": call.wanted, "slots": call.slots}
        columns |= {"modes": call.modes, "pending": call.pending}
        for name, column in columns.items():
            parts[name][:n] = column
        parts["tokens"][:] = -1  # for steps that are not run
        parts["block_table"].reshape(-1, width)[:n, : block_table.shape[1]] = block_table
        self._fill_stop(call, stop, parts)
        self._staging.send(first_row + n * width)
        return packed.is_edited

    def num_going(self) -> int:
        """Return how many requests the stop rule lets continue; waits for the step."""
        self._host_num_going.copy_(self.stop.num_going, non_blocking=True)
        self._runtime.wait()
        return int(self._host_num_going[0])

    def give_to(self, batch: PassInputs, ops: Ops, size: int) -> None:
        """Set up the next pass: one row per request, of its newest token."""
        draws = self.draws
        batch.take_step(ops, draws.newest[:size], draws.known[:size], draws.remaining[:size], self._block_table[:size])

    def give_tokens(self, batch: PassInputs, ops: Ops, size: int, step: tuple[Tensor, Tensor, Tensor]) -> None:
        """Set up a pass like give_to(). step: newest, known and remaining, each int32 [>= size]."""
        newest, known, remaining = (values[:size] for values in step)
        batch.take_step(ops, newest, known, remaining, self._block_table[:size])

    def read(self, count: int) -> tuple[Int32Array, npt.NDArray[np.float32], Int32Array, Int32Array | None]:
        """Return tokens and margins [count, max_batch_size], candidates [count, max_batch_size, NUM_CANDIDATES] and,
        if kept, runners-up of the first `count` steps, in the call's order of requests. Waits for the copies."""
        for host, output in zip(self._host, self._outputs, strict=True):
            host[:count].copy_(output[:count], non_blocking=True)
        self._runtime.wait()
        tokens, margins, candidates, *others = (host.numpy()[:count] for host in self._host)
        return tokens, margins, candidates, others[0] if others else None

    def _fill_stop(self, call: DraftCall, stop: DraftStop | None, parts: Mapping[str, Int32Array]) -> None:
        survival = parts["survival"].view(np.float64)[: call.slots.size]
        survival[:] = 1.0
        if stop is None:
            parts["step_price"].view(np.float32)[:] = -np.inf
            return
        if call.pending.any():
            address = self._native_stop.address(stop, self._width - 1)
            pending_survival(address, call.sampling, call.slots, call.num_tokens, call.pending, survival)
        tables = parts["tables"].view(np.float32).reshape(4, NUM_MODES, self._width)
        for table, values in zip(tables, (stop.slope, stop.intercept, stop.prior, stop.spread), strict=True):
            table[:, : values.shape[1]] = values
        for name, values in (("row_price", stop.row_price), ("step_price", stop.step_price)):
            prices = parts[name].view(np.float32)[: values.size]
            prices[:] = values[: prices.size]
