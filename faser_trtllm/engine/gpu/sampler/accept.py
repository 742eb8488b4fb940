"""Rejection sampling on the device: one upload, two launches, and one read that the host waits for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.gpu.limits import most_logit_rows
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs
from faser_trtllm.engine.gpu.sampler.logits import DeviceLogits
from faser_trtllm.engine.gpu.sampler.probs import log_probs
from faser_trtllm.engine.gpu.sampler.upload import EntryUpload
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.arrays import SAMPLING_DTYPE, Int32Array, SamplingArray
from faser_trtllm.ops.cuda.accept import Stages, stages_of, workspace_bytes
from faser_trtllm.ops.log_probs import LogProbs, TokenRows, token_log_probs
from faser_trtllm.ops.transfer.count_tests import count_tests
from faser_trtllm.ops.transfer.pack_sampling import ENTRY_INTS, has_edits
from faser_trtllm.partition.green_context import GpuPartition
from faser_trtllm.sampling.draft_probs import DraftProbs, HostDraftProbs
from faser_trtllm.sampling.rejection import BranchTokens, VerificationRows

if TYPE_CHECKING:
    from torch import Tensor

_TOKENS_PER_REQUEST = 64  # initial capacity of the upload buffer, which grows on demand
_EDITED_ROWS = 256  # at a time, since a row takes 4 bytes per vocabulary entry
_LOG_PROB_ROWS = 32  # at a time, since a row takes about 50 bytes per vocabulary entry


class Target(Protocol):
    """The part of the target's engine that the sampler uses."""

    @property
    def spec(self) -> EngineSpec: ...

    @property
    def runtime(self) -> Runtime: ...

    @property
    def partition(self) -> GpuPartition: ...

    def pass_ms(self) -> float: ...


class GpuRejectionSampler:
    """RejectionSampler for logits that stayed on the engine's device.

    The pass may still be running when sample() starts. The token after each branch is drawn in the same launches, since
    the host does not know yet which branches are recovered; the draws are independent. If a request edits its logits,
    the requests are verified in pieces whose rows fit the scratch for edited logits.
    """

    def __init__(self, target: Target, ops: Ops, max_draft_len: int, draft_probs: DeviceDraftProbs | None) -> None:
        """draft_probs: where the draft engine keeps its unseeded distributions; None without a draft model."""
        import torch

        if draft_probs is not None and draft_probs.tensor.shape[1] != max_draft_len:
            raise ValueError(f"draft_probs holds {draft_probs.tensor.shape[1]} drafts per request, not {max_draft_len}")
        spec, runtime = target.spec, target.runtime
        self.draft_probs: DraftProbs = draft_probs or HostDraftProbs(spec.max_batch_size, 0, spec.vocab_size)
        self._draft_probs_address = None if draft_probs is None else draft_probs.device_address
        self._target = target
        self._ops = ops
        self._vocab_size = spec.vocab_size
        self._max_draft_len = max_draft_len
        batch = spec.num_slots
        with runtime.on(target.partition):
            self._upload = EntryUpload(runtime, spec.vocab_size, batch * (ENTRY_INTS + 4 + _TOKENS_PER_REQUEST) + 64)
            self._iota = torch.arange(batch, dtype=torch.int32, device=runtime.device)
            self._result = torch.zeros(batch * (max_draft_len + 5), dtype=torch.int32, device=runtime.device)
            self._make_scratch(batch * (max_draft_len + 1))
            # Before graphs are captured, which take half of what is free.
            shape = (edited_rows(most_logit_rows(spec), max_draft_len), spec.vocab_size)
            self._edited = torch.zeros(shape, dtype=torch.float32, device=runtime.device)
            runtime.wait()
        self._host_result = runtime.host_tensor(tuple(self._result.shape), torch.int32)
        self._result_views: tuple[int, AcceptResult, AcceptResult] | None = None

    def sample(
        self, sampling: SamplingArray, logits: Any, rows: VerificationRows, branches: BranchTokens | None = None
    ) -> AcceptResult:
        """See RejectionSampler.sample. logits: DeviceLogits [num_rows, vocab_size]."""
        import torch

        assert isinstance(logits, DeviceLogits)
        every = rows if branches is None else _with_branches(rows, branches)
        n, cu_logit_rows = every.slots.size, every.cu_logit_rows
        num_rows = int(cu_logit_rows[n])
        if logits.shape[0] < num_rows:
            raise ValueError(f"{num_rows} rows are to be verified, logits has {logits.shape[0]}")
        target, runtime, used = self._target, self._target.runtime, n * (self._max_draft_len + 5)
        result, found = self._results(n)
        with runtime.on(target.partition), torch.no_grad():
            columns = (every.num_tokens, every.num_drafts)
            uploaded = self._upload.send(
                sampling,
                every.slots,
                *columns,
                cu_logit_rows,
                *columns,
                num_rows=every.num_rows,
                branch_tokens=() if branches is None else branches.token_ids.tolist(),
                draft_probs=self._draft_probs_address,
            )
            if num_rows > self._verdicts.shape[0]:  # branches add rows
                self._make_scratch(2 * num_rows)
            entries = uploaded.on_device.view(torch.uint8).view(n, SAMPLING_DTYPE.itemsize)
            launch = functools.partial(self._launch, entries, stages_of(sampling[every.slots]))
            if uploaded.is_edited:
                starts, *counts = uploaded.columns
                for piece in _pieces(cu_logit_rows, self._edited.shape[0]):
                    first, end = int(cu_logit_rows[piece.start]), int(cu_logit_rows[piece.stop])
                    parts = (starts[piece.start : piece.stop + 1] - first, *(column[piece] for column in counts))
                    edited = self._edited[: end - first]
                    launch(self._iota[piece], logits.tensor[first:end], parts, result.part(piece), edited)
            else:
                launch(self._iota[:n], logits.tensor[:num_rows], uploaded.columns, result, None)
            self._host_result[:used].copy_(self._result[:used], non_blocking=True)
            runtime.wait()
        verified = found if branches is None else found.part(slice(rows.slots.size))
        count_tests(sampling, rows.slots, rows.num_tokens, verified.num_accepted, verified.outcome)
        if branches is None:
            return verified
        taken = branches.recovered(verified)
        return branches.follow(verified, taken, found.part(rows.slots.size + taken))

    def pass_ms(self, forward_ms: float, sample_ms: float) -> float:
        """See RejectionSampler.pass_ms. Returns the device's time, or forward_ms if launching took longer."""
        return max(forward_ms, self._target.pass_ms())

    def take(self, logits: Any, rows: npt.NDArray[np.int64]) -> DeviceLogits:
        import torch

        assert isinstance(logits, DeviceLogits)
        runtime = self._target.runtime
        with runtime.on(self._target.partition), torch.no_grad():
            index = torch.from_numpy(rows).to(runtime.device)
            return DeviceLogits(logits.tensor.index_select(0, index))

    def log_probs(self, logits: Any, asked: TokenRows) -> LogProbs:
        """See RejectionSampler.log_probs. Rows that a request edits are computed on the host, all others on the device,
        so a row's bits do not depend on other requests."""
        import torch

        assert isinstance(logits, DeviceLogits)
        if asked.rows.size > _LOG_PROB_ROWS:
            starts = range(0, asked.rows.size, _LOG_PROB_ROWS)
            return LogProbs.join([self.log_probs(logits, asked.where(slice(at, at + _LOG_PROB_ROWS))) for at in starts])
        is_edited = (asked.sampling["masks"] != 0) | has_edits(asked.sampling, asked.positions)
        if is_edited.any() and not is_edited.all():
            parts = {edited: self.log_probs(logits, asked.where(is_edited == edited)) for edited in (True, False)}
            return LogProbs.merge(parts[True], parts[False], is_edited)
        runtime = self._target.runtime
        with runtime.on(self._target.partition), torch.no_grad():
            rows = logits.tensor.index_select(0, torch.from_numpy(asked.rows).to(runtime.device))
            if is_edited.any():
                return token_log_probs(rows.cpu().numpy(), self._vocab_size, asked)
            return log_probs(rows, asked)

    def _launch(
        self,
        entries: Tensor,
        stages: Stages,
        slots: Tensor,
        logits: Tensor,
        columns: Sequence[Tensor],
        result: AcceptResult,
        edited: Tensor | None,
    ) -> None:
        """Verify requests whose rows are all of `logits`. columns: their cu_logit_rows, num_tokens and num_drafts."""
        starts, num_tokens, num_drafts = columns
        self._ops.accept(
            entries,
            slots,
            logits,
            self._vocab_size,
            starts,
            num_tokens,
            num_drafts,
            self._max_draft_len,
            result,
            self._verdicts[: logits.shape[0]],
            edited,
            workspace=self._workspace,
            stages=stages,
        )

    def _make_scratch(self, num_rows: int) -> None:
        import torch

        device = self._target.runtime.device
        self._verdicts = torch.zeros((num_rows, 3), dtype=torch.int32, device=device)
        num_bytes = workspace_bytes(num_rows, self._vocab_size)
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device) if num_bytes else None

    def _results(self, n: int) -> tuple[AcceptResult, AcceptResult]:
        """Return the results of n requests, on the device and on the host; the views are kept for the next step."""
        if self._result_views is None or self._result_views[0] != n:
            on_device, on_host = (
                AcceptResult.over(flat, n, self._max_draft_len) for flat in (self._result, self._host_result.numpy())
            )
            self._result_views = n, on_device, on_host
        return self._result_views[1:]


def edited_rows(max_logit_rows: int, max_draft_len: int) -> int:
    """Return the number of rows of scratch for edited logits, which is at least any request's."""
    return min(max_logit_rows, max(_EDITED_ROWS, max_draft_len + 1))


def _pieces(cu_logit_rows: Int32Array, most: int) -> list[slice]:
    """Cut the requests into pieces of at most `most` rows, which is at least any request's."""
    pieces, begin, num_requests = [], 0, cu_logit_rows.size - 1
    while begin < num_requests:
        end = int(np.searchsorted(cu_logit_rows, cu_logit_rows[begin] + most, "right")) - 1
        pieces.append(slice(begin, max(begin + 1, end)))
        begin = pieces[-1].stop
    return pieces


def _with_branches(rows: VerificationRows, branches: BranchTokens) -> VerificationRows:
    """Return the requests and then, for each branch, a request of one row whose last token is the branch's."""
    parents = branches.requests
    ones = np.ones_like(parents)
    columns = (
        (rows.slots, rows.slots[parents]),
        (rows.num_rows, ones),
        (rows.num_tokens, rows.num_tokens[parents] + branches.places + 1),
        (rows.num_drafts, np.zeros_like(parents)),
    )
    return VerificationRows(*(np.concatenate(pair) for pair in columns))
