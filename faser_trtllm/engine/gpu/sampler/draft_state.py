"""The draft loop's device state between steps, at fixed addresses for captured graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.gpu.batch import PassInputs
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.sampler.probs import ProbsParameters, inverse_temperature
from faser_trtllm.engine.gpu.sampler.table import ADDRESSES
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.arrays import SAMPLING_DTYPE

if TYPE_CHECKING:
    from torch import Tensor

Int32Array = npt.NDArray[np.int32]

_ENTRY_INTS = SAMPLING_DTYPE.itemsize // 4


class DraftState:
    """The requests of one draft call and what each step drew. Tensors are [max_batch_size] unless noted.

    entries uint8 [max_batch_size, 160]: sampling parameters, without addresses. known int32: number of tokens so far,
    which is the position of the next one. remaining int32: tokens still to draft; 0 once a request has stopped. slots
    int32. seeded_temperature fp32: 0 unless the request is seeded. leads fp32: gumbel_lead of the newest draw, 0 unless
    it was seeded. Per step: tokens, margins, candidates [max_draft_len, max_batch_size, ...]; token -1 where a request
    drew nothing.
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
        entries, self.known, self.remaining, self.slots, self.is_sampled, *views = views
        temperature, *filters, table, self._step = views
        self.entries = entries.view(torch.uint8).view(batch, SAMPLING_DTYPE.itemsize)
        self.seeded_temperature = temperature.view(torch.float32)
        inv_temperature, top_p, min_p = (section.view(torch.float32) for section in filters[:3])
        self._filters = (inv_temperature, top_p, min_p, filters[3])
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
        """Remove all requests: a step then draws and writes nothing."""
        self._staging.device.zero_()
        self.known.fill_(1)

    def without_edits(self, entries: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Entries of requests without edits, for upload(): nothing that they point to is read."""
        own = entries.copy()
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
        """Load the requests of a call, in the order of their logits. entries: with device addresses, or null ones."""
        n = slots.size
        filled = self._staging.fill()
        filled[:] = 0
        sections: list[Any] = [filled[start : start + size] for start, size in self._sections]
        place, host_known, remaining, host_slots, is_sampled, seeded_temperature, *filters, table, _ = sections
        inv_temperature, top_p, min_p, top_k = filters
        place[: n * _ENTRY_INTS] = entries.view(np.int32)
        host_known[:] = 1
        host_known[:n], remaining[:n], host_slots[:n] = known, wanted, slots
        is_sampled[:n] = entries["mode"] == native.SAMPLED
        own_temperature = np.where(entries["mode"] == native.SEEDED, entries["temperature"], 0)
        seeded_temperature[:n] = own_temperature.astype(np.float32).view(np.int32)
        inv_temperature[:] = np.ones((), np.float32).view(np.int32)
        inv_temperature[:n] = inverse_temperature(entries).view(np.int32)
        for section, name in ((top_p, "top_p"), (min_p, "min_p")):
            section[:n] = np.ascontiguousarray(entries[name], np.float32).view(np.int32)
        top_k[:n] = entries["top_k"]
        table.reshape(self._block_table.shape)[:n, : block_table.shape[1]] = block_table
        self._staging.send(self._staging.size)

    def probs_parameters(self, size: int) -> ProbsParameters:
        inv_temperature, top_p, min_p, top_k = self._filters
        return ProbsParameters(inv_temperature[:size], top_p[:size], min_p[:size], top_k[:size])

    def result(self, size: int) -> AcceptResult:
        """Output buffers of the draw of the first `size` requests: one token each."""
        token_ids, *counts = (tensor[:size] for tensor in self._result)
        tensors: Any = (token_ids.view(size, 1), *counts)
        return AcceptResult(*tensors)

    def record(self, size: int, token: Tensor, is_drawn: Tensor, margin: Tensor, candidates: Tensor) -> Tensor:
        """Record what a step drew and advance known and remaining -> which requests drew a token [size] bool."""
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
        return is_new

    def give_to(self, batch: PassInputs, size: int) -> None:
        """Set up the next pass: one row per request, its newest token."""
        goes_on = self.remaining[:size] > 0
        batch.take_step(self._token[:size], self.known[:size], goes_on, self._block_table[:size])

    def read(self, count: int, num_requests: int) -> tuple[Int32Array, npt.NDArray[np.float32], Int32Array]:
        """Tokens, margins [count, num_requests] and candidates [count, num_requests, n] of the first steps; waits."""
        for host, output in zip(self._host, self._outputs, strict=True):
            host[:count].copy_(output[:count], non_blocking=True)
        self._runtime.wait()
        tokens, margins, candidates = (host.numpy()[:count, :num_requests] for host in self._host)
        return tokens, margins, candidates
