"""A model of two tables that runs anywhere, to drive the whole executor with either scheduler.

The next token depends on the last three tokens, which are read back from KV blocks: a wrong block or a stale row
changes the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.config import CapacitySchedulerPolicy, ExecutorConfig, SchedulerConfig, SchedulerKind
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.closing import Closing
from faser_trtllm.core.plan import RequestOutput, StepRecord
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import DraftBatch, EngineSpec
from faser_trtllm.executor.factory import assemble
from faser_trtllm.executor.stats import StepWatcher
from faser_trtllm.ops.prune_rows import HostPruning
from faser_trtllm.policy.static import FixedPolicy
from lab.clock import ManualClock
from lab.reference.draft_loop import draft_loop

VOCAB_SIZE = 6
CONTEXT = 3
MAX_SEQ_LEN = 48
MAX_DRAFT_LEN = 4
NUM_REQUESTS = 8
SPEC = EngineSpec(
    vocab_size=VOCAB_SIZE,
    max_seq_len=MAX_SEQ_LEN,
    num_layers=1,
    num_blocks=20,
    tokens_per_block=4,
    max_num_tokens=20,
    max_batch_size=4,
    segments=(0, 1),
)


class TableEngine(HostPruning, Closing):
    """An engine with a table of logits [VOCAB_SIZE ** CONTEXT, VOCAB_SIZE] fp32, in one segment."""

    distinct_experts = 0.0  # it has no experts

    def __init__(self, table: npt.NDArray[np.float32]) -> None:
        self.spec = SPEC
        self._table = table
        self._kv = np.full((SPEC.num_blocks, SPEC.tokens_per_block), -1, np.int64)

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        rows = np.repeat(batch.slots, np.diff(batch.cu_rows)).tolist()
        for token, slot, position in zip(batch.token_ids, rows, batch.positions, strict=True):
            self._kv[self._place(batch, slot, position)] = token
        wanted = [self._context(batch, rows[row], batch.positions[row]) for row in batch.logit_rows]
        return self._table[np.array(wanted, np.int64)]

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32]:
        return self.forward(batch)

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        return draft_loop(self.forward, VOCAB_SIZE, draft_batch)

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        raise NotImplementedError("one segment has no boundary to drop rows at")

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        raise NotImplementedError("one segment has no boundary to exit at")

    def close(self) -> None:
        """Do nothing; no memory is held."""

    def _place(self, batch: RaggedBatch, slot: int, position: int) -> tuple[int, int]:
        size = SPEC.tokens_per_block
        return int(batch.block_table[slot, position // size]), int(position % size)

    def _context(self, batch: RaggedBatch, slot: int, position: int) -> int:
        index = 0
        for place in range(position - CONTEXT + 1, position + 1):
            token = int(self._kv[self._place(batch, slot, place)]) if place >= 0 else 0
            assert token >= 0, "a position was read whose KV was never written"
            index = index * VOCAB_SIZE + token
        return index


@dataclass
class TinyRun(StepWatcher):
    """The result of a run: tokens by request, and numbers of pauses, chunks and accepted drafts."""

    tokens: dict[str, list[int]]
    num_paused: int = 0
    num_chunks: int = 0
    num_accepted: int = 0

    def step(self, record: StepRecord) -> None:
        rows = record.plan.scheduled
        self.num_paused += len(record.plan.paused)
        self.num_chunks += len(rows) - rows.num_sampled
        self.num_accepted += record.num_accepted


def run_tiny_model(scheduler: SchedulerKind, capacity: CapacitySchedulerPolicy) -> TinyRun:
    """Run eight requests with different draft lengths in a cache that is too small for them."""
    rng = np.random.default_rng(7)
    target = (2 * rng.standard_normal((VOCAB_SIZE**CONTEXT, VOCAB_SIZE))).astype(np.float32)
    draft = (target + 0.8 * rng.standard_normal(target.shape)).astype(np.float32)
    config = ExecutorConfig(
        scheduler=scheduler,
        scheduler_config=SchedulerConfig(capacity_scheduler_policy=capacity, chunk_unit_size=4),
    )
    run = TinyRun({})
    with assemble(
        TableEngine(target),
        TableEngine(draft),
        FixedPolicy(MAX_DRAFT_LEN),
        config,
        max_seq_len=MAX_SEQ_LEN,
        max_draft_len=MAX_DRAFT_LEN,
        clock=ManualClock(),
    ) as executor:
        executor.watch(run)
        for index in range(NUM_REQUESTS):
            prompt = rng.integers(0, VOCAB_SIZE, 3 + 3 * index).tolist()
            params = SamplingParams(max_tokens=20, num_draft_tokens=index % (MAX_DRAFT_LEN + 1))
            executor.submit(str(index), prompt, params, _collect(run.tokens.setdefault(str(index), [])))
        while executor.step():
            executor.check_integrity()
    return run


def _collect(tokens: list[int]) -> Any:
    def sink(output: RequestOutput) -> bool:
        tokens.extend(output.new_token_ids)
        return False

    return sink
