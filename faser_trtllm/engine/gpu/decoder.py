"""The interface of a GPU backend's layers, which run over rows in device memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from faser_trtllm.engine.gpu.batch import PassInputs
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.partition.green_context import GpuPartition

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bounds:
    """Host-side bounds over a pass's requests, which select attention's tiles and splits; a Decoder uses few values."""

    max_query_rows: int
    max_kv_len: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The ops and runtime of an engine and its decoder, and the partition that they start on."""

    ops: Ops
    runtime: Runtime
    partition: GpuPartition


class Decoder(Protocol):
    """One model's layers, KV memory and hidden rows, all at fixed addresses.

    Work is enqueued on the current stream. Passes with equal rows and Bounds enqueue the same work, which depends only
    on the contents of device memory, so they can share a graph.
    """

    @property
    def batch(self) -> PassInputs: ...

    @property
    def has_fixed_shapes(self) -> bool:
        """True if each pass size takes memory of its own, so that there should be few large sizes."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in device memory."""

    @property
    def has_kv(self) -> bool:
        """True if rows without logits have an effect, because they write KV."""

    @property
    def num_distinct(self) -> Tensor | None:
        """Experts whose weights a pass has read, summed over its layers, int32 [1]; None for a dense model."""

    def hidden(self, segment: int) -> Tensor:
        """Return [max_num_tokens, hidden_size], the buffer that a segment leaves its rows in."""

    def query_rows(self, num_query_rows: int, rows: int) -> int:
        """Return the bucket for the largest number of rows of one request, in a pass of `rows` rows."""

    def kv_lens(self) -> tuple[int, ...]:
        """Return the bounds on context lengths that lead to different work, ascending; the last is max_seq_len."""

    def run(self, rows: int, first: int, last: int, bounds: Bounds) -> None:
        """Run segments [first, last) over the batch's first `rows` rows, with dummies; segment 0 embeds the tokens."""

    def write_logits(self, logits: Tensor) -> None:
        """After the last segment, fill `logits` fp32 [n, vocab_size] for the first n of batch.logit_rows. A block
        drafter runs a pass of its own for them."""

    def step(self, rows: int, bounds: Bounds, logits: Tensor) -> None:
        """Run a whole pass of one row per request after the last pass, with logits for each. A head continues from
        its own output for the request's previous row."""

    @property
    def is_read(self) -> bool:
        """True if a head reads hidden rows that the passes keep."""

    def early_exit(self, segment: int, num_hidden: int, rows: Tensor, candidates: Tensor, out: Tensor) -> None:
        """Write LM head scores to `out` fp32 [n, num_candidates], after a segment that left num_hidden rows.

        rows int32 [n]: indices of hidden rows. candidates int32 [n, num_candidates]: token ids, -1 for none.
        """

    @property
    def has_prune_plan(self) -> bool:
        """True if prune() is available: scores, decision and compaction as one compiled plan."""

    def prune(self, segment: int, rows: int, inputs: Mapping[str, Tensor], kept: Tensor) -> None:
        """Compact a segment's `rows` hidden rows, with dummies, in place, and fill `kept` int32 [num_requests].

        inputs: exit_rows, candidates, places, before, cu_drafts, starts and rule (ops/cuda/prune_rows.py).
        """

    def copy_kv(self, copies: Tensor) -> None:
        """Copy tokens between KV blocks (ops/cuda/copy_kv.py), and hidden rows kept for a head. For branches only."""

    def close(self) -> None: ...


class OneSegmentDecoder:
    """The members common to Decoders that run every pass whole, without branches or a head that reads hidden rows."""

    has_fixed_shapes = False
    has_prune_plan = False
    num_distinct = None
    is_read = False
    _hidden: Tensor
    _max_seq_len: int

    def hidden(self, segment: int) -> Tensor:
        return self._hidden

    def query_rows(self, num_query_rows: int, rows: int) -> int:
        return rows

    def kv_lens(self) -> tuple[int, ...]:
        return (self._max_seq_len,)

    def early_exit(self, segment: int, num_hidden: int, rows: Tensor, candidates: Tensor, out: Tensor) -> None:
        raise NotImplementedError("there is one segment")

    def prune(self, segment: int, rows: int, inputs: Mapping[str, Tensor], kept: Tensor) -> None:
        raise NotImplementedError("there is one segment")

    def copy_kv(self, copies: Tensor) -> None:
        raise NotImplementedError("there are no branches")
