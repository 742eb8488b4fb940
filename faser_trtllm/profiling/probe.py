"""Both engines of a directory with filled caches, and the passes that a profile times."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

import numpy as np

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.batch import BatchBuilder, RaggedBatch
from faser_trtllm.core.request import NUM_CANDIDATES, Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.cpu import CpuEngine
from faser_trtllm.ops.accept import Acceptor
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.profiling.grid import CONTEXTS, MANY_REQUESTS, Limits, Point
from faser_trtllm.sampling.table import SamplingTable

MAX_ROWS = 320
TEMPERATURE = 0.8
DRAFTED = 8  # tokens of a timed draft call, so that the call itself weighs little


class Probe:
    """Owns the core sets, the engines and their caches. Not thread-safe, except that the draft and the target may run
    in two threads when they are on different core sets.

    Partitions: "all" is every core; with two cores or more "draft" is the last one and "verify" the others.
    """

    def __init__(self, engines: EngineDir, cores: tuple[int, ...] | None, num_threads: int | None) -> None:
        built = engines.build_config
        self._stack = ExitStack()
        blocks_per_token = built.tokens_per_block
        max_draft_len = max(1, built.max_draft_len)
        margin = max(max_draft_len + 1, DRAFTED) + 1
        max_context = min(CONTEXTS[-1], built.max_seq_len - margin)
        self.limits = Limits(
            max_rows=min(MAX_ROWS, built.max_num_tokens),
            max_num_requests=min(32, built.max_batch_size),
            max_context=max_context,
            max_draft_len=built.max_draft_len,
        )
        blocks_per_seq = -(-(max_context + margin) // blocks_per_token)
        num_slots = self.limits.max_num_requests
        self._table = np.arange(num_slots * blocks_per_seq, dtype=np.int32).reshape(num_slots, blocks_per_seq)
        rng = np.random.default_rng(0)
        self._tokens = rng.integers(1, engines.vocab_size, max_context + margin, dtype=np.int32)
        try:
            self.core_sets = self._open_core_sets(cores, num_threads)
            sizes = {
                "num_blocks": self._table.size,
                "tokens_per_block": blocks_per_token,
                "max_batch_size": num_slots,
                "max_num_tokens": max(self.limits.max_rows, num_slots),
                "max_seq_len": max_context + margin,
            }
            everything = self.core_sets["all"]
            self.target = self._stack.enter_context(CpuEngine.open(engines.target_path, everything, **sizes))
            self.draft: CpuEngine | None = None
            if engines.has_draft:
                self.draft = self._stack.enter_context(CpuEngine.open(engines.draft_path, everything, **sizes))
            self._max_draft_len = max(DRAFTED, max_draft_len)
            # One table per lane: they may run in two threads.
            self._drafting, self._testing = (
                SamplingTable(num_slots, engines.vocab_size, self._max_draft_len) for _ in range(2)
            )
            self._tester = Acceptor(num_slots, engines.vocab_size, self._max_draft_len)
            self._uniform = np.float32(1.0 / engines.vocab_size)
        except BaseException:
            self._stack.close()
            raise

    @property
    def partitions(self) -> tuple[str, ...]:
        return tuple(self.core_sets)

    def fill(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Run prompts through both engines, so that attention reads what it would read in service."""
        limits = self.limits
        num_slots = limits.max_num_requests
        for slot in range(num_slots):
            length = limits.max_context if slot < min(MANY_REQUESTS, num_slots) else limits.main_context()
            for first in range(0, length, limits.max_rows):
                batch = self._batch([(slot, first, min(length, first + limits.max_rows))], logits=0)
                self.target.forward(batch)
                if self.draft is not None:
                    self.draft.forward(batch)
            if progress is not None:
                progress(slot + 1, num_slots)

    def use(self, partition: str, engine: CpuEngine | None = None) -> None:
        """Move an engine (default: both) to a partition."""
        for each in (self.target, self.draft) if engine is None else (engine,):
            if each is not None:
                each.use(self.core_sets[partition])

    def runner(self, point: Point) -> Callable[[], float]:
        """A function that runs the pass of a point once -> ms (of one draft step for draft_step)."""
        spread = _spread(point.num_rows, point.num_requests)
        rows = [(slot, point.context_len, point.context_len + n) for slot, n in enumerate(spread)]
        requests = [self._request(slot, end) for slot, _, end in rows]
        if point.kind in ("verify", "decode"):
            return self._verify_runner(rows, requests)
        assert self.draft is not None
        draft, num_new = self.draft, DRAFTED if point.kind == "draft_step" else 1
        batch = self._batch(rows, logits=1)
        n = point.num_requests
        counts = [np.zeros(n, np.int32) for _ in range(3)]
        num_tokens, num_drafts, num_new_drafts = counts
        num_tokens[:] = [end for _, _, end in rows]
        num_new_drafts[:] = num_new

        def run() -> float:
            self._bind(self._drafting, requests)
            array = self._drafting.array
            ms = _milliseconds(
                lambda: draft.draft(batch, array, num_tokens, num_drafts, num_new_drafts, self._max_draft_len)
            )
            return ms / num_new

        return run

    def _verify_runner(self, rows: list[tuple[int, int, int]], requests: list[Request]) -> Callable[[], float]:
        """The pass and the free test behind it."""
        batch, tester = self._batch(rows, logits=None), self._tester

        def work() -> None:
            logits = self.target.forward(batch)
            tester.clear()
            for slot, first, end in rows:
                tester.add(slot, end - first, first + 1, end - first - 1)
            tester.run(self._testing.array, logits)

        def run() -> float:
            self._bind(self._testing, requests)
            return _milliseconds(work)

        return run

    def _bind(self, sampling: SamplingTable, requests: list[Request]) -> None:
        for slot, request in enumerate(requests):
            sampling.bind(slot, request)
            if not request.params.is_greedy:
                sampling.draft_probs(slot)[:] = self._uniform

    def displace(self, point: Point) -> None:
        """Run the other engine, as it runs before this pass in service: it leaves other weights in the caches."""
        if self.draft is None or point.kind == "decode":
            return
        slots = min(4, self.limits.max_num_requests)
        context = self.limits.main_context()
        batch = self._batch([(slot, context, context + 1) for slot in range(slots)], logits=1)
        (self.draft if point.kind == "verify" else self.target).forward(batch)

    def segment_ms(self, num_rows: int, num_requests: int, context_len: int) -> list[float]:
        """One pass of the target in segments -> ms of each."""
        spread = _spread(num_rows, num_requests)
        batch = self._batch([(s, context_len, context_len + n) for s, n in enumerate(spread)], logits=None)
        times = []
        for segment in range(len(self.target.spec.segments) - 1):
            times.append(_milliseconds(lambda s=segment: self.target.run_segment(batch, s)))  # type: ignore[misc]
        return times

    def exit_ms(self, num_rows: int, num_runs: int) -> list[float]:
        """Candidate scores of num_rows rows at the first boundary, num_runs times -> ms of each."""
        context = self.limits.main_context()
        spread = _spread(num_rows, min(num_rows, self.limits.max_num_requests))
        batch = self._batch([(slot, context, context + n) for slot, n in enumerate(spread)], logits=0)
        self.target.run_segment(batch, 0)
        rows = np.arange(num_rows, dtype=np.int32)
        candidates = np.resize(self._tokens, (num_rows, NUM_CANDIDATES))
        return [_milliseconds(lambda: self.target.early_exit(rows, candidates)) for _ in range(num_runs)]

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_core_sets(self, cores: tuple[int, ...] | None, num_threads: int | None) -> dict[str, CoreSet]:
        everything = self._stack.enter_context(CoreSet(cores, num_threads))
        sets = {"all": everything}
        used = everything.cores[: everything.num_threads]
        if len(used) >= 2:
            sets["verify"] = self._stack.enter_context(CoreSet(used[:-1]))
            sets["draft"] = self._stack.enter_context(CoreSet(used[-1:]))
        return sets

    def _batch(self, rows: list[tuple[int, int, int]], logits: int | None) -> RaggedBatch:
        """(slot, first, end) per request; logits: of so many last rows each, None for all."""
        num_rows = sum(end - first for _, first, end in rows)
        builder = BatchBuilder(len(rows), num_rows, self._tokens.size, self._table)
        for slot, first, end in rows:
            builder.add(slot, self._tokens, first, end, end - first if logits is None else logits)
        return builder.build()

    def _request(self, slot: int, num_tokens: int) -> Request:
        """Every other request is greedy; of the others, every other one has a seed, which makes draws dearer."""
        return Request(
            "probe",
            self._tokens[:num_tokens],
            SamplingParams(
                max_tokens=DRAFTED + 1,
                temperature=TEMPERATURE if slot % 2 else 0.0,
                seed=slot if slot % 4 == 3 else None,
            ),
            max_seq_len=self._tokens.size,
            max_draft_len=self._max_draft_len,
        )


def _spread(num_rows: int, num_requests: int) -> list[int]:
    return [num_rows // num_requests + (i < num_rows % num_requests) for i in range(num_requests)]


def _milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)
