"""Score, select and compact the hidden rows between two segments of a pass, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.buckets import Buckets
from faser_trtllm.engine.gpu.batch import PassInputs
from faser_trtllm.engine.gpu.decoder import Decoder
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.boundary_checks import check_asked, check_listed
from faser_trtllm.ops.cuda.compact_rows import CompactedRows
from faser_trtllm.ops.cuda.early_exit import MAX_CANDIDATES
from faser_trtllm.ops.prune_rows import PruneBatch, kept_rows

if TYPE_CHECKING:
    from torch import Tensor

Int32Array = npt.NDArray[np.int32]

_RULE_SIZE = 5


class Boundary:
    """The segment boundary of one engine. Work is enqueued on the current stream."""

    def __init__(self, decoder: Decoder, ops: Ops, runtime: Runtime, buckets: Buckets, spec: EngineSpec) -> None:
        import torch

        self._decoder = decoder
        self._ops = ops
        self._runtime = runtime
        self._buckets = buckets
        self._spec = spec
        rows, batch = spec.max_num_tokens, spec.max_batch_size
        self._staging = Staging(runtime, (3 + MAX_CANDIDATES) * (rows + 4) + 2 * (batch + 5) + _RULE_SIZE + 3)
        self._kept = torch.zeros(batch, dtype=torch.int32, device=runtime.device)
        self._host_kept = runtime.host_tensor((batch,), torch.int32)
        self._listed = torch.zeros(rows, dtype=torch.int32, device=runtime.device)
        self._compaction = _Compaction(decoder.hidden(0), decoder.batch)
        self._num_hidden: int | None = None  # hidden rows after the last segment, without dummies
        self._segment = 0  # the segment that left them
        self._row_of: Int32Array | None = None  # see PassInputs

    def reach(self, segment: int, num_rows: int) -> None:
        """Record that a segment has left num_rows hidden rows for the batch that was uploaded last."""
        self._segment, self._num_hidden, self._row_of = segment, num_rows, self._decoder.batch.row_of

    def leave(self) -> None:
        """Record that there are no hidden rows any more."""
        self._num_hidden = None

    @property
    def num_hidden(self) -> int:
        """The number of hidden rows; raises InvalidArgumentError if there are none."""
        if self._num_hidden is None:
            raise InvalidArgumentError("there are no hidden rows, run a segment that is not the last one first")
        return self._num_hidden

    def compact_rows(self, rows: Int32Array) -> None:
        check_listed(rows, self.num_hidden)
        size = self._buckets.rows(rows.size)
        listed = self._staging.fill()
        listed[: rows.size], listed[rows.size : size] = self._placed(rows), -1
        self._staging.send(size)
        self._compact(self._staging.device[:size])
        self._keep(rows)

    def early_exit(self, rows: Int32Array, candidates: Int32Array) -> npt.NDArray[np.float32]:
        """See Engine.early_exit. The host waits for the scores."""
        check_asked(rows, candidates, self.num_hidden, self._spec.vocab_size, MAX_CANDIDATES)
        if not candidates.size:
            return np.zeros(candidates.shape, np.float32)
        asked = rows if self._row_of is None else self._row_of[rows]
        device_rows, device_candidates = self._send(asked, candidates)
        found: npt.NDArray[np.float32] = (
            self._scores(device_rows, device_candidates.view(candidates.shape)).cpu().numpy()
        )
        return found

    def prune(self, batch: PruneBatch) -> Int32Array:
        """See Engine.prune. Scores, decision and compaction are enqueued together, and the host only reads counts."""
        import torch

        num_drafts = batch.num_rows - 1
        cu_drafts = np.concatenate([[0], np.cumsum(num_drafts)]).astype(np.int32)
        starts = batch.starts if self._row_of is None else self._row_of[batch.starts]
        inside = np.arange(cu_drafts[-1]) - np.repeat(cu_drafts[:-1], num_drafts)
        rows = (np.repeat(starts, num_drafts) + inside).astype(np.int32)
        before, rule = (array.astype(np.float32).view(np.int32) for array in (batch.rule.before, batch.rule.weights()))
        sent = self._send(rows, batch.candidates, batch.places, before, cu_drafts, starts, rule)
        names = ("exit_rows", "candidates", "places", "before", "cu_drafts", "starts", "rule")
        inputs = dict(zip(names, sent, strict=True))
        inputs["candidates"] = inputs["candidates"].view(batch.candidates.shape)
        inputs |= {name: inputs[name].view(torch.float32) for name in ("before", "rule")}
        n = batch.num_rows.size
        size = self._buckets.rows(self.num_hidden)
        if self._decoder.has_prune_plan:
            self._decoder.prune(self._segment, size, inputs, self._kept[:n])
        else:
            scores, listed = self._scores(inputs.pop("exit_rows"), inputs.pop("candidates")), self._listed[:size]
            self._ops.prune_rows(scores, **inputs, num_hidden=self.num_hidden, kept=self._kept[:n], rows=listed)
            self._compact(listed)
        self._host_kept[:n].copy_(self._kept[:n], non_blocking=True)
        self._runtime.wait()
        kept: Int32Array = self._host_kept.numpy()[:n].copy()
        self._keep(kept_rows(batch, kept))
        return kept

    def _placed(self, rows: Int32Array) -> Int32Array:
        """Return the decoder's indices of these rows, ascending."""
        return rows if self._row_of is None else np.sort(self._row_of[rows])

    def _keep(self, rows: Int32Array) -> None:
        """Record that only these hidden rows are left."""
        if self._row_of is not None:
            self._row_of = np.searchsorted(self._placed(rows), self._row_of[rows]).astype(np.int32)
        self._num_hidden = rows.size

    def _send(self, *arrays: Int32Array) -> list[Tensor]:
        """Return copies of the arrays on the device, flat, each at a multiple of 16 bytes."""
        filled, ends = self._staging.fill(), [0]
        for array in arrays:
            filled[ends[-1] : ends[-1] + array.size] = array.reshape(-1)
            ends.append(ends[-1] + -(-array.size // 4) * 4)
        self._staging.send(ends[-1])
        device = self._staging.device
        return [device[start : start + array.size] for start, array in zip(ends, arrays, strict=False)]

    def _scores(self, rows: Tensor, candidates: Tensor) -> Tensor:
        import torch

        scores = torch.empty(candidates.shape, dtype=torch.float32, device=self._runtime.device)
        self._decoder.early_exit(self._segment, self._buckets.rows(self.num_hidden), rows, candidates, scores)
        return scores

    def _compact(self, listed: Tensor) -> None:
        """Compact the hidden rows to `listed`: the rows that stay, then -1 for dummies."""
        hidden, batch, num_hidden = self._decoder.hidden(self._segment), self._decoder.batch, self.num_hidden
        kept = self._compaction.kept(listed.shape[0])
        self._ops.compact_rows(
            hidden[:num_hidden],
            batch.positions[:num_hidden],
            listed,
            batch.cu_q_lens,
            batch.kv_lens,
            self._spec.max_seq_len,
            kept,
        )
        # Copy back to where graphs expect hidden rows; their ragged arrays are uploaded with the next batch.
        hidden[: listed.shape[0]].copy_(kept.hidden)


class _Compaction:
    """Output buffers of compact_rows, which must not overlap its inputs."""

    def __init__(self, hidden: Tensor, batch: PassInputs) -> None:
        import torch

        self._hidden = torch.zeros_like(hidden)
        sizes = (hidden.shape[0], hidden.shape[0], batch.cu_q_lens.shape[0], batch.kv_lens.shape[0])
        self._arrays = [torch.zeros(size, dtype=torch.int32, device=hidden.device) for size in sizes]

    def kept(self, rows: int) -> CompactedRows:
        positions, request_ids, cu_q_lens, kv_lens = self._arrays
        return CompactedRows(self._hidden[:rows], positions[:rows], request_ids[:rows], cu_q_lens, kv_lens)
