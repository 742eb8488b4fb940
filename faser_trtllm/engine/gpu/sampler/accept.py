"""The free test on the device: one upload, two launches, and one read that the host waits for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.engine.gpu.engine import GpuEngine
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.sampler.draft import DraftProbs
from faser_trtllm.engine.gpu.sampler.logits import DeviceLogits
from faser_trtllm.engine.gpu.sampler.probs import ProbsParameters, log_probs
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.log_probs import LogProbs, TokenRows, token_log_probs
from faser_trtllm.ops.transfer.count_tests import count_tests
from faser_trtllm.ops.transfer.pack_sampling import ENTRY_INTS, SamplingPacker, has_edits

if TYPE_CHECKING:
    from torch import Tensor

_TOKENS_PER_REQUEST = 64  # initial capacity per request of the upload buffer, which grows on demand
_LOG_PROB_ROWS = 32  # at once, since a row takes some 50 bytes for each token of the vocabulary


class DeviceAcceptor:
    """As ops.accept.Acceptor, for logits that stayed on the engine's device (GpuEngine with keep_logits).

    Results are valid until the next call. pass_ms: time of the tested pass, which may still be running when run()
    starts. Scratch for edited logits is allocated when a request first needs it.
    """

    def __init__(self, engine: GpuEngine, ops: Ops, max_draft_len: int, draft_probs: DraftProbs | None) -> None:
        """draft_probs: where the draft engine keeps its unseeded distributions; None without a draft model."""
        import torch

        if draft_probs is not None and draft_probs.tensor.shape[1] != max_draft_len:
            raise ValueError(f"draft_probs holds {draft_probs.tensor.shape[1]} drafts per request, not {max_draft_len}")
        spec, runtime = engine.spec, engine.runtime
        self._branch_tokens: list[int] = []
        self._engine = engine
        self._ops = ops
        self._vocab_size = spec.vocab_size
        self._max_draft_len = max_draft_len
        self._draft_probs = draft_probs
        batch = spec.num_slots
        counts = [np.zeros(size, np.int32) for size in (batch, batch + 1, batch, batch)]
        self._slots, self._cu_logit_rows, self._num_tokens, self._num_drafts = counts
        self._packer = SamplingPacker(spec.vocab_size)
        size = batch * (ENTRY_INTS + 4 + _TOKENS_PER_REQUEST) + 64
        with runtime.on(engine.partition):
            self._staging = Staging(runtime, size)
            self._iota = torch.arange(batch, dtype=torch.int32, device=runtime.device)
            self._result = torch.zeros(batch * (max_draft_len + 5), dtype=torch.int32, device=runtime.device)
            self._verdicts = torch.zeros((0, 3), dtype=torch.int32, device=runtime.device)
            self._edited: Tensor | None = None
            runtime.wait()
        self._host_result = runtime.host_tensor(tuple(self._result.shape), torch.int32)
        self.pass_ms = 0.0
        self._num_requests = self._num_rows = 0
        self._behind: AcceptResult | None = None
        self._result_views: tuple[int, AcceptResult, AcceptResult] | None = None

    def load(
        self, slots: Sequence[int], num_rows: Sequence[int], num_tokens: Sequence[int], num_drafts: Sequence[int]
    ) -> None:
        """As Acceptor.load."""
        n = self._num_requests = len(slots)
        self._slots[:n], self._num_tokens[:n], self._num_drafts[:n] = slots, num_tokens, num_drafts
        np.cumsum(num_rows, out=self._cu_logit_rows[1 : n + 1])
        self._num_rows = int(self._cu_logit_rows[n])
        self._branch_tokens = []

    def load_branches(self, slots: Sequence[int], num_tokens: Sequence[int], token_ids: Sequence[int]) -> None:
        """As BranchTester.load_branches; at most max_num_branches."""
        n, end = self._num_requests, self._num_requests + len(slots)
        self._slots[n:end], self._num_tokens[n:end], self._num_drafts[n:end] = slots, num_tokens, 0
        self._cu_logit_rows[n + 1 : end + 1] = self._num_rows + 1 + np.arange(len(slots))
        self._num_rows += len(slots)
        self._branch_tokens = list(token_ids)

    def branches(self) -> AcceptResult:
        """As BranchTester.branches."""
        assert self._behind is not None, "run() has drawn nothing behind branches"
        return self._behind

    def run(self, sampling: npt.NDArray[np.void], logits: Any) -> AcceptResult:
        """As Acceptor.run; logits: DeviceLogits [num_rows, vocab_size]."""
        import torch

        assert isinstance(logits, DeviceLogits)
        num_tested, rows = self._num_requests, self._num_rows
        n = num_tested + len(self._branch_tokens)
        if logits.shape[0] < rows:
            raise ValueError(f"{rows} rows were loaded, logits has {logits.shape[0]}")
        slots = self._slots[:n]
        engine, runtime, used = self._engine, self._engine.runtime, n * (self._max_draft_len + 5)
        result, on_host = self._results(n)
        with runtime.on(engine.partition), torch.no_grad():
            (cu_logit_rows, num_tokens, num_drafts), is_edited = self._upload(sampling, n)
            device = self._staging.device
            if rows > self._verdicts.shape[0]:
                self._verdicts = torch.zeros((2 * rows, 3), dtype=torch.int32, device=runtime.device)
            if is_edited and (self._edited is None or rows > self._edited.shape[0]):
                self._edited = None  # the old rows first, since these may be a gigabyte
                shape = (1 << (rows - 1).bit_length(), self._vocab_size)
                self._edited = torch.zeros(shape, dtype=torch.float32, device=runtime.device)
            self._ops.accept(
                device[: n * ENTRY_INTS].view(torch.uint8).view(n, SAMPLING_DTYPE.itemsize),
                self._iota[:n],
                logits.tensor[:rows],
                self._vocab_size,
                cu_logit_rows,
                num_tokens,
                num_drafts,
                self._max_draft_len,
                result,
                self._verdicts[:rows],
                self._edited[:rows] if is_edited and self._edited is not None else None,
            )
            self._host_result[:used].copy_(self._result[:used], non_blocking=True)
            runtime.wait()
        self.pass_ms = engine.pass_ms()
        found = on_host
        if self._branch_tokens:
            found, self._behind = (_part(found, part) for part in (slice(num_tested), slice(num_tested, n)))
        tested = (slots[:num_tested], self._num_tokens[:num_tested])
        count_tests(sampling, *tested, found.num_accepted, found.outcome)
        return found

    def take(self, logits: Any, rows: npt.NDArray[np.int64]) -> DeviceLogits:
        """As Acceptor.take."""
        import torch

        assert isinstance(logits, DeviceLogits)
        runtime = self._engine.runtime
        with runtime.on(self._engine.partition), torch.no_grad():
            index = torch.from_numpy(rows).to(runtime.device)
            return DeviceLogits(logits.tensor.index_select(0, index))

    def log_probs(self, logits: Any, asked: TokenRows) -> LogProbs:
        """As Acceptor.log_probs. Edited rows, of which the device has no exact copy, are copied to the host; the others
        never are, so that their bits do not depend on who else asks."""
        import torch

        assert isinstance(logits, DeviceLogits)
        if asked.rows.size > _LOG_PROB_ROWS:
            starts = range(0, asked.rows.size, _LOG_PROB_ROWS)
            return LogProbs.join([self.log_probs(logits, asked.where(slice(at, at + _LOG_PROB_ROWS))) for at in starts])
        is_edited = (asked.sampling["masks"] != 0) | has_edits(asked.sampling, asked.positions)
        if is_edited.any() and not is_edited.all():
            parts = {edited: self.log_probs(logits, asked.where(is_edited == edited)) for edited in (True, False)}
            return LogProbs.merge(parts[True], parts[False], is_edited)
        runtime = self._engine.runtime
        with runtime.on(self._engine.partition), torch.no_grad():
            rows = logits.tensor.index_select(0, torch.from_numpy(asked.rows).to(runtime.device))
            if is_edited.any():
                return token_log_probs(rows.cpu().numpy(), self._vocab_size, asked)
            token_ids = torch.from_numpy(asked.token_ids).to(runtime.device)
            is_greedy = torch.from_numpy(asked.sampling["mode"] == native.GREEDY).to(runtime.device)
            parameters = ProbsParameters.of(asked.sampling, runtime.device)
            num_top = min(int(asked.num_top.max(initial=0)), self._vocab_size)
            values, ids, tops = log_probs(rows, token_ids, is_greedy, parameters, num_top)
            pairs = zip(ids.cpu().numpy(), tops.cpu().numpy(), asked.num_top.tolist(), strict=True)
            return LogProbs(values.cpu().numpy(), [(best[:num], logs[:num]) for best, logs, num in pairs])

    def park(self, slot: int) -> Any:
        """As ProbsMemory.park."""
        import torch

        assert self._draft_probs is not None, "nothing is drawn without a draft model"
        with self._engine.runtime.on(self._engine.partition), torch.no_grad():
            parked = self._draft_probs.tensor[slot].clone()
            self._engine.runtime.wait()
        return parked

    def restore(self, slot: int, parked: Any) -> None:
        """As ProbsMemory.restore."""
        import torch

        assert self._draft_probs is not None, "nothing is drawn without a draft model"
        with self._engine.runtime.on(self._engine.partition), torch.no_grad():
            self._draft_probs.tensor[slot].copy_(parked)
            self._engine.runtime.wait()

    def _results(self, n: int) -> tuple[AcceptResult, AcceptResult]:
        """Of n requests, on the device and on the host; kept, since most steps are of as many as the last one."""
        if self._result_views is None or self._result_views[0] != n:
            on_device, on_host = (
                _split(flat, n, self._max_draft_len) for flat in (self._result, self._host_result.numpy())
            )
            self._result_views = n, on_device, on_host
        return self._result_views[1:]

    def _upload(self, sampling: npt.NDArray[np.void], n: int) -> tuple[list[Tensor], bool]:
        """Send what n requests' tests read, entries first -> cu_logit_rows, num_tokens and num_drafts on the device,
        and whether somebody edits logits."""
        known, pending = self._num_tokens[:n], self._num_drafts[:n]
        num_rows = self._cu_logit_rows[1 : n + 1] - self._cu_logit_rows[:n]
        while True:
            filled, device = self._staging.fill(), self._staging.device
            size, is_edited = self._packer.pack(
                sampling,
                self._slots[:n],
                known,
                pending,
                filled,
                device.data_ptr(),
                num_rows=num_rows,
                branch_tokens=self._branch_tokens,
                draft_probs=None if self._draft_probs is None else self._draft_probs.address,
            )
            end = -(-size // 4) * 4
            needed = end + 3 * n + 1
            if needed <= self._staging.size:
                break
            self._engine.runtime.wait()
            self._staging = Staging(self._engine.runtime, max(needed, 2 * self._staging.size))
        sections = []
        for array in (self._cu_logit_rows[: n + 1], known, pending):
            filled[end : end + array.size] = array
            sections.append(device[end : end + array.size])
            end += array.size
        self._staging.send(end)
        return sections, is_edited


def _part(found: AcceptResult, part: slice) -> AcceptResult:
    counts = (found.num_tokens, found.num_accepted, found.outcome, found.row_status)
    return AcceptResult(found.token_ids[part], *(each[part] for each in counts))


def _split(flat: Any, n: int, max_draft_len: int) -> AcceptResult:
    """The fields of an AcceptResult as views of one array or tensor."""
    width = max_draft_len + 1
    ends = [n * width + k * n for k in range(5)]
    counts = (flat[begin:end] for begin, end in itertools.pairwise(ends))
    return AcceptResult(flat[: n * width].reshape(n, width), *counts)
