"""What the draft loop keeps on the device between steps, at addresses that captured graphs keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.cuda_batch import DeviceBatch
from faser_trtllm.engine.cuda_law import LawParameters
from faser_trtllm.engine.cuda_runtime import Runtime
from faser_trtllm.engine.cuda_sampling import ADDRESSES
from faser_trtllm.engine.cuda_staging import Staging
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.arrays import SAMPLING_DTYPE

if TYPE_CHECKING:
    from torch import Tensor

Int32Array = npt.NDArray[np.int32]

_ENTRY_INTS = SAMPLING_DTYPE.itemsize // 4


class DraftState:
    """Requests of one draft call, [max_batch_size] unless it says otherwise, and what each step drew.

    entries uint8 [max_batch_size, 160]: how they draw, without addresses. known int32: tokens they have, so also the
    position of the next one. remaining int32: tokens they still want; 0 once they stopped. slots int32.
    race_temperature fp32: of a seeded request, else 0. leads fp32: of the newest draw, 0 if it was no race. Per step:
    tokens, margins, candidates [max_draft_len, max_batch_size, ...]; token -1 where a request drew nothing.
    """

    def __init__(self, runtime: Runtime, spec: EngineSpec, max_draft_len: int, max_blocks_per_seq: int) -> None:
        import torch

        self._runtime = runtime
        batch, device = spec.max_batch_size, runtime.device
        sizes = (batch * _ENTRY_INTS, *[batch] * 9, batch * max_blocks_per_seq, 1)
        ends = np.cumsum([-(-size // 4) * 4 for size in sizes]).tolist()
        self._sections = [(end - -(-size // 4) * 4, size) for end, size in zip(ends, sizes, strict=True)]
        self._staging = Staging(runtime, ends[-1])
        views = [self._staging.device[start : start + size] for start, size in self._sections]
        entries, self.known, self.remaining, self.slots, self.is_sampled, temperature, *law, table, self._step = views
        self.entries = entries.view(torch.uint8).view(batch, SAMPLING_DTYPE.itemsize)
        self.race_temperature = temperature.view(torch.float32)
        inv_temperature, top_p, min_p = (section.view(torch.float32) for section in law[:3])
        self._law = (inv_temperature, top_p, min_p, law[3])
        self._block_table = table.view(batch, max_blocks_per_seq)
        self.iota = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self.zeros = torch.zeros(batch, dtype=torch.int32, device=device)
        self.verdicts = torch.zeros((batch, 3), dtype=torch.int32, device=device)
        self.leads = torch.zeros(batch, dtype=torch.float32, device=device)
        self._result = [torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(5)]
        self._token = torch.zeros(batch, dtype=torch.int32, device=device)
        width = min(NUM_CANDIDATES, spec.vocab_size)
        shape = (max_draft_len, batch)
        outputs = ((shape, torch.int32), (shape, torch.float32), ((*shape, width), torch.int32))
        self._outputs = [torch.zeros(size, dtype=dtype, device=device) for size, dtype in outputs]
        self._host = [runtime.host_tensor(size, dtype) for size, dtype in outputs]

    def clear(self) -> None:
        """No requests: a step then draws and writes nothing."""
        self._staging.device.zero_()
        self.known.fill_(1)

    def upload(
        self,
        entries: npt.NDArray[np.void],
        slots: Int32Array,
        known: Int32Array,
        wanted: Int32Array,
        block_table: Int32Array,
    ) -> None:
        """The requests of a call, in the order of their logits. entries: without edits (has_edits)."""
        n = slots.size
        filled = self._staging.fill()
        filled[:] = 0
        sections: list[Any] = [filled[start : start + size] for start, size in self._sections]
        place, host_known, remaining, host_slots, is_sampled, race_temperature, *law, table, _ = sections
        inv_temperature, top_p, min_p, top_k = law
        own = entries.copy()
        for name in ADDRESSES:
            own[name] = 0
        own["tokens"] = self._staging.device.data_ptr()  # never read where nothing is pending, but it must be there
        for name in ("num_end_ids", "num_bias", "num_bad_words"):
            own[name] = 0
        place[: n * _ENTRY_INTS] = own.view(np.int32)
        host_known[:] = 1
        host_known[:n], remaining[:n], host_slots[:n] = known, wanted, slots
        is_sampled[:n] = entries["mode"] == native.SAMPLED
        own_temperature = np.where(entries["mode"] == native.SEEDED, entries["temperature"], 0)
        race_temperature[:n] = own_temperature.astype(np.float32).view(np.int32)
        largest = np.finfo(np.float32).max
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.float32(1) / entries["temperature"]
        inv_temperature[:] = np.ones((), np.float32).view(np.int32)
        inv_temperature[:n] = np.minimum(inverse, largest).astype(np.float32).view(np.int32)
        for section, name in ((top_p, "top_p"), (min_p, "min_p")):
            section[:n] = np.ascontiguousarray(entries[name], np.float32).view(np.int32)
        top_k[:n] = entries["top_k"]
        table.reshape(self._block_table.shape)[:n, : block_table.shape[1]] = block_table
        self._staging.send(self._staging.size)

    def keep(self, goes_on: npt.NDArray[np.bool_], left: Int32Array) -> None:
        """Requests [n] that go on, and how many tokens they still want; the others stop."""
        import torch

        remaining = np.where(goes_on, left, 0).astype(np.int32)
        self.remaining[: remaining.size].copy_(torch.from_numpy(remaining))

    def law_parameters(self, size: int) -> LawParameters:
        inv_temperature, top_p, min_p, top_k = self._law
        return LawParameters(inv_temperature[:size], top_p[:size], min_p[:size], top_k[:size])

    def result(self, size: int) -> AcceptResult:
        """Where the draw of the first `size` requests writes: one token each."""
        token_ids, *counts = (tensor[:size] for tensor in self._result)
        tensors: Any = (token_ids.view(size, 1), *counts)
        return AcceptResult(*tensors)

    def record(self, size: int, token: Tensor, is_drawn: Tensor, margin: Tensor, candidates: Tensor) -> None:
        """Keep what a step drew, and go on to the next: known and remaining are counted."""
        import torch

        remaining, known = self.remaining[:size], self.known[:size]
        is_new = is_drawn & (remaining > 0)
        drawn = torch.where(is_new, token, -1)
        step = self._step.long()
        for output, values in zip(self._outputs, (drawn, margin, candidates), strict=True):
            output[:, :size].index_copy_(0, step, values[None].to(output.dtype))
        self._token[:size].copy_(drawn.clamp(min=0))
        remaining.copy_(torch.where(is_new, remaining - 1, 0))
        known.add_(is_new.int())
        self._step.add_(1)

    def give_to(self, batch: DeviceBatch, size: int) -> None:
        """The next pass: one row per request, its newest token. Who stopped has no KV length, so nothing is written."""
        import torch

        goes_on, known = self.remaining[:size] > 0, self.known[:size]
        batch.token_ids[:size].copy_(self._token[:size])
        batch.positions[:size].copy_(torch.where(goes_on, known - 1, 0))
        batch.kv_lens.zero_()
        batch.kv_lens[:size].copy_(torch.where(goes_on, known, 0))
        batch.cu_q_lens.copy_(self.iota.clamp(max=size))
        batch.block_table[:size].copy_(self._block_table[:size])
        batch.logit_rows[:size].copy_(self.iota[:size])

    def read(self, first: int, count: int, num_requests: int) -> tuple[Int32Array, npt.NDArray[np.float32], Int32Array]:
        """Tokens, margins [count, num_requests] and candidates [count, num_requests, n] of some steps; waits."""
        for host, output in zip(self._host, self._outputs, strict=True):
            host[first : first + count].copy_(output[first : first + count], non_blocking=True)
        self._runtime.wait()
        tokens, margins, candidates = (host.numpy()[first : first + count, :num_requests] for host in self._host)
        return tokens, margins, candidates
