"""The part that a GPU backend gives its engine: the layers, over rows in device memory."""

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
    """Host-side bounds over the requests of a pass, which choose the tiles and splits of attention; a Decoder's few."""

    max_query_rows: int
    max_kv_len: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The ops and the runtime of an engine and its decoder, and the partition that they begin on."""

    ops: Ops
    runtime: Runtime
    partition: GpuPartition


class Decoder(Protocol):
    """One model's layers, KV memory and hidden rows, all at fixed addresses.

    Work is enqueued on the current stream. Passes of equal rows, query_rows() and kv_len() enqueue the same work, which
    depends on the contents of device memory only, so they can share a graph.
    """

    @property
    def batch(self) -> PassInputs: ...

    @property
    def has_fixed_shapes(self) -> bool:
        """Each size of a pass takes memory of its own, so that there should be few large ones."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of device memory of the weights."""

    @property
    def has_kv(self) -> bool:
        """Rows without logits count for something."""

    @property
    def num_distinct(self) -> Tensor | None:
        """int32 [1]: experts whose weights a pass has read, summed over its layers; None: the model is no mixture."""

    def hidden(self, segment: int) -> Tensor:
        """[max_num_tokens, hidden_size]: the rows that a segment leaves."""

    def query_rows(self, num_query_rows: int, rows: int) -> int:
        """The bucket for the most rows of one request, in a pass of `rows` rows."""

    def kv_lens(self) -> tuple[int, ...]:
        """Bounds of contexts with work of their own, ascending; the last is max_seq_len."""

    def run(self, rows: int, first: int, last: int, bounds: Bounds) -> None:
        """Segments [first, last) over the batch's first `rows` rows, dummies included; segment 0 embeds the tokens."""

    def write_logits(self, logits: Tensor) -> None:
        """After the last segment: fill fp32 [n, vocab_size] for the first n of batch.logit_rows. A block drafter's is a
        pass of its own, which run() has no part in."""

    def step(self, rows: int, bounds: Bounds, logits: Tensor) -> None:
        """A whole pass of one row per request after the last pass, with logits of each; a head goes on from its own
        output of the request's row before."""

    @property
    def is_read(self) -> bool:
        """A head reads what the passes keep of their hidden rows."""

    def early_exit(self, segment: int, num_hidden: int, rows: Tensor, candidates: Tensor, out: Tensor) -> None:
        """LM head scores after a segment that left num_hidden rows -> out fp32 [n, num_candidates].

        rows [n] int32: of its hidden rows. candidates [n, num_candidates] int32: token ids, -1 for none.
        """

    @property
    def has_prune_plan(self) -> bool:
        """prune() is there: scores, decision and compaction as one compiled plan."""

    def prune(self, segment: int, rows: int, inputs: Mapping[str, Tensor], kept: Tensor) -> None:
        """After a segment that left `rows` rows, dummies included: hidden rows are compacted in place.

        inputs: exit_rows, candidates, places, before, cu_drafts, starts and rule (ops/cuda/prune_rows.py). kept int32
        [num_requests] is filled.
        """

    def copy_kv(self, copies: Tensor) -> None:
        """Copy tokens between KV blocks, as ops/cuda/copy_kv.py has it, and what is kept of them for a head; of a
        decoder whose engine has branches."""

    def close(self) -> None: ...
