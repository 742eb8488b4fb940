"""Engines with filled caches, and the passes that a profile times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.core.batch import BatchBuilder, RaggedBatch
from faser_trtllm.core.closing import Closing
from faser_trtllm.core.request import NUM_CANDIDATES, Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import DraftBatch, Engine
from faser_trtllm.profiling.grid import CATCH_UP_ROWS, CONTEXTS, MAIN_CONTEXT, MANY_REQUESTS, Limits, Point
from faser_trtllm.sampling.rejection import RejectionSampler, VerificationRows
from faser_trtllm.sampling.table import SamplingTable

TEMPERATURE = 0.8
FILLED_ROWS = 64  # rows of a pass that fills caches within a budget
LEAST_SHARE = 0.01  # least cost of a block's further drafts, as a share of its time: noise may make it negative
DRAFTED = 8  # tokens that a timed draft call drafts, to amortise its overhead


class Probe(Closing):
    """Open engines and their caches. Not thread-safe, except that draft and target may run in two threads on different
    partitions.

    A backend's probe overrides pin() and wait(). A mixture of experts runs different tokens in each slot, because
    tokens decide which experts are read.

    num_units: cores or SMs of "all". num_threads: host threads that passes run on. num_experts: distinct experts that
    the target read, by point.
    """

    num_units: int
    num_threads: int = 1
    row_sizes: tuple[int, ...] = ()  # passes are padded to these

    def __init__(
        self,
        target: Engine,
        draft: Engine | None,
        sampler: RejectionSampler,
        places: Mapping[str, Any],
        limits: Limits,
        num_filled_slots: int,
        stack: ExitStack | None = None,
    ) -> None:
        """Allocate caches.

        places: where an engine moves, by partition: "all" and, if overlap is measured, "draft" and "verify".
        num_filled_slots: slots with their own caches, which the others share. stack: closed with the probe.
        """
        self._stack = stack or ExitStack()
        self._places = places
        self.partitions = tuple(places)
        self.target: Any = target  # of the backend's type, which has use()
        self.draft: Any = draft
        self.limits = limits
        self._sampler = sampler
        spec = target.spec
        blocks_per_seq = -(-spec.max_seq_len // spec.tokens_per_block)
        num_slots = limits.max_num_requests
        self._table = np.arange(num_slots * blocks_per_seq, dtype=np.int32).reshape(num_slots, blocks_per_seq)
        self._num_filled_slots = num_filled_slots
        for slot in range(num_filled_slots, num_slots):
            num_read = limits.main_context() // spec.tokens_per_block  # blocks after them are written to
            self._table[slot, :num_read] = self._table[slot % num_filled_slots, :num_read]
        self.num_experts: dict[Point, float] = {}
        rng = np.random.default_rng(0)
        num_texts = num_slots if spec.num_experts else 1
        texts = rng.integers(1, spec.vocab_size, (num_texts, spec.max_seq_len), dtype=np.int32)
        self._tokens = [texts[slot % num_texts] for slot in range(num_slots)]
        self._max_draft_len = probe_draft_len(limits.max_draft_len)
        self._num_steps = min(DRAFTED, max(1, limits.max_draft_len))  # Medusa heads have no more
        # One sampling table per stream, since streams may run in two threads.
        self._drafting, self._testing = (
            SamplingTable(num_slots, spec.vocab_size, self._max_draft_len) for _ in range(2)
        )
        self._uniform = np.float32(1.0 / spec.vocab_size)

    def use(self, partition: str, engine: Any = None) -> None:
        """Move an engine (default: both) to a partition."""
        for each in (self.target, self.draft) if engine is None else (engine,):
            if each is not None:
                each.use(self._places[partition])

    def pin(self, partition: str) -> None:
        """Bind the calling thread to a partition before it runs an engine there."""

    def wait(self, engine: Engine) -> None:
        """Wait for the engine's work; not needed after a call that returns results to the host."""

    def fill(self, progress: Callable[[int, int], None] | None = None, budget_s: float = math.inf) -> None:
        """Run prompts through both engines for at most budget_s, so that attention reads realistic caches."""
        limits = self.limits
        num_slots = self._num_filled_slots
        deadline_s = time.perf_counter() + budget_s
        num_rows = limits.max_rows if math.isinf(budget_s) else min(limits.max_rows, FILLED_ROWS)
        for slot in range(num_slots):
            length = limits.max_context if slot < min(MANY_REQUESTS, num_slots) else limits.main_context()
            for first in range(0, length, num_rows):
                if time.perf_counter() > deadline_s:
                    return
                batch = self._batch([(slot, first, min(length, first + num_rows))], logits=0)
                self.target.forward(batch)
                if self.draft is not None:
                    self.draft.forward(batch)
                for engine in (self.target, self.draft):
                    if engine is not None:
                        self.wait(engine)
            if progress is not None:
                progress(slot + 1, num_slots)

    def runner(self, point: Point) -> Callable[[], float]:
        """Return a function that runs a point's pass once and returns its ms (for draft_step: the ms of one step)."""
        spread = _split_evenly(point.num_rows, point.num_requests)
        rows = [(slot, point.context_len, point.context_len + n) for slot, n in enumerate(spread)]
        requests = [self._request(slot, end) for slot, _, end in rows]
        if point.kind in ("verify", "decode"):
            return self._verify_runner(point, rows, requests)
        assert self.draft is not None
        draft, num_new = self.draft, self._num_steps if point.kind == "draft_step" else 1
        batch = self._batch(rows, logits=1)
        n = point.num_requests
        counts = [np.zeros(n, np.int32) for _ in range(3)]
        num_tokens, num_drafts, num_new_drafts = counts
        num_tokens[:] = [end for _, _, end in rows]
        num_new_drafts[:] = num_new

        def run() -> float:
            self._bind(self._drafting, requests)
            array = self._drafting.array
            call = DraftBatch(batch, array, num_tokens, num_drafts, num_new_drafts, self._max_draft_len)
            return _milliseconds(lambda: draft.draft(call))

        def run_places() -> float:
            """Time a further draft of a block, without the block's pass."""
            num_new_drafts[:] = num_new
            all_ms = run()
            num_new_drafts[:] = 1
            return max(LEAST_SHARE * all_ms, all_ms - run()) / (num_new - 1)

        if draft.spec.block_size and num_new > 1:
            return run_places
        return lambda: run() / num_new

    def _verify_runner(
        self, point: Point, rows: list[tuple[int, int, int]], requests: list[Request]
    ) -> Callable[[], float]:
        """Return a function that runs the target's pass with rejection sampling once and returns its ms."""
        batch, sampler = self._batch(rows, logits=None, same_tokens=point.same_tokens), self._sampler

        def work() -> None:
            logits = self.target.forward(batch)
            slots, first, end = np.array(rows, np.int32).T.copy()
            sampled = VerificationRows(slots, end - first, first + 1, end - first - 1)
            sampler.sample(self._testing.array, logits, sampled)

        def run() -> float:
            self._bind(self._testing, requests)
            ms = _milliseconds(work)
            self.num_experts[point] = self.target.distinct_experts
            return ms

        return run

    def _bind(self, sampling: SamplingTable, requests: list[Request]) -> None:
        for slot, request in enumerate(requests):
            sampling.bind(slot, request)
            if not request.params.is_greedy:
                sampling.draft_probs.rows(slot)[:] = self._uniform

    def displace(self, point: Point) -> None:
        """Run the other engine, as it runs in service before this pass, so that caches hold its weights."""
        if self.draft is None or point.kind == "decode":
            return
        context = self.limits.main_context()
        other = self.draft if point.kind == "verify" else self.target
        other.forward(self._batch([(0, context, context + 1)], logits=0 if other.spec.block_size else 1))
        self.wait(other)

    def segment_ms(self, num_rows: int, num_requests: int, context_len: int) -> list[float]:
        spread = _split_evenly(num_rows, num_requests)
        batch = self._batch([(s, context_len, context_len + n) for s, n in enumerate(spread)], logits=None)
        times = []
        for segment in range(len(self.target.spec.segments) - 1):
            times.append(_milliseconds(lambda s=segment: self._run_segment(batch, s)))  # type: ignore[misc]
        return times

    def _run_segment(self, batch: RaggedBatch, segment: int) -> None:
        self.target.run_segment(batch, segment)
        self.wait(self.target)

    def exit_ms(self, num_rows: int, num_runs: int) -> list[float]:
        """Score candidates of num_rows rows at the first boundary num_runs times and return the ms of each run."""
        spread = _split_evenly(num_rows, min(num_rows, self.limits.max_num_requests))
        context = min(self.limits.main_context(), self._tokens[0].size - max(spread))
        batch = self._batch([(slot, context, context + n) for slot, n in enumerate(spread)], logits=0)
        self._run_segment(batch, 0)
        rows = np.arange(num_rows, dtype=np.int32)
        candidates = np.resize(self._tokens[0], (num_rows, NUM_CANDIDATES))
        return [_milliseconds(lambda: self.target.early_exit(rows, candidates)) for _ in range(num_runs)]

    def close(self) -> None:
        self._stack.close()

    def _batch(self, rows: list[tuple[int, int, int]], logits: int | None, same_tokens: bool = False) -> RaggedBatch:
        """Return a batch of positions (slot, first, end). logits: last rows of each request with logits, None: all."""
        builder = BatchBuilder(self._table)
        for slot, first, end in rows:
            tokens = self._tokens[0 if same_tokens else slot]
            builder.add(slot, tokens, first, end, end - first if logits is None else logits)
        return builder.build()

    def _request(self, slot: int, num_tokens: int) -> Request:
        """Return a slot's request: half of them are greedy, and a quarter are seeded, whose draws cost more."""
        return Request(
            "probe",
            self._tokens[slot][:num_tokens],
            SamplingParams(
                max_tokens=DRAFTED + 1,
                temperature=TEMPERATURE if slot % 2 else 0.0,
                seed=slot if slot % 4 == 3 else None,
            ),
            max_seq_len=self._tokens[slot].size,
            max_draft_len=self._max_draft_len,
        )


def probe_draft_len(max_draft_len: int) -> int:
    """Return the number of drafts that a probe's engines and tables must hold."""
    return max(DRAFTED, max_draft_len)


def context_limits(built_seq_len: int, max_draft_len: int, largest: int) -> tuple[int, int]:
    """Return the longest context to measure, at most `largest`, and the max_seq_len that it needs."""
    margin = max(max_draft_len + 1, DRAFTED) + 1
    max_context = min(largest, built_seq_len - margin)
    return max_context, max_context + margin


def largest_context(quick: bool) -> int:
    return MAIN_CONTEXT + CATCH_UP_ROWS[-1] if quick else CONTEXTS[-1]


def probe_sizes(built: BuildConfig, quick: bool, max_rows: int, max_requests: int) -> tuple[Limits, BuildConfig, int]:
    """Return the limits of the grid, and the limits and number of KV blocks to open the engines with.

    max_rows, max_requests: limits of a pass.
    """
    max_context, max_seq_len = context_limits(built.max_seq_len, built.max_draft_len, largest_context(quick))
    limits = Limits(
        max_rows=min(max_rows, built.max_num_tokens),
        max_num_requests=min(max_requests, built.max_batch_size),
        max_context=max_context,
        max_draft_len=built.max_draft_len,
    )
    needed = BuildConfig(
        max_batch_size=limits.max_num_requests,
        max_num_tokens=max(limits.max_rows, limits.max_num_requests),
        max_seq_len=max_seq_len,
        max_draft_len=probe_draft_len(built.max_draft_len),
        tokens_per_block=built.tokens_per_block,
    )
    return limits, needed, needed.max_batch_size * -(-needed.max_seq_len // needed.tokens_per_block)


def _split_evenly(num_rows: int, num_requests: int) -> list[int]:
    return [num_rows // num_requests + (i < num_rows % num_requests) for i in range(num_requests)]


def _milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)
