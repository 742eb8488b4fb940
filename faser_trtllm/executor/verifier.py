"""The verifying half of a step: one target pass over all frontiers and context chunks, then the free test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.core.clock import Clock
from faser_trtllm.core.decision import Mode
from faser_trtllm.core.plan import DraftResult, KeptRows, SchedulerOutput, VerifyResult
from faser_trtllm.core.request import Request
from faser_trtllm.engine.base import Engine
from faser_trtllm.executor.lanes import Drafting
from faser_trtllm.executor.pruner import Pruner
from faser_trtllm.native import SEEDED
from faser_trtllm.ops import accept
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.law import next_token_probs
from faser_trtllm.ops.synthetic_accept import RowTester, SyntheticAcceptor, Tester, place_probabilities
from faser_trtllm.policy.base import Policy
from faser_trtllm.sampling.table import SamplingTable

CARRIED, FAILED = int(accept.Outcome.CARRIED), int(accept.Outcome.FAILED)  # comparing enums takes ten times as long
NAN_LOGITS = "the target model returned NaN or infinite logits for this request; check the checkpoint's weights"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """acceptance: as ops.synthetic_accept.place_probabilities takes it."""

    acceptance: float | tuple[float, ...]
    seed: int = 0


class DeviceTester(RowTester, Protocol):
    """The free test where the logits are: as ops.accept.Acceptor, for logits that the host does not hold.

    The pass may still run when run() is called; pass_ms tells afterwards how long it took.
    """

    pass_ms: float


class Verifier:
    """Runs the rows that the plan and the policy give each request, and tests what they reached."""

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingTable,
        policy: Policy,
        block_table: npt.NDArray[np.int32],
        max_draft_len: int,
        clock: Clock,
        pool: int | None = None,
        device_tester: DeviceTester | None = None,
        synthetic: SyntheticAcceptance | None = None,
    ) -> None:
        """pool: the threads that share the free test (a core set's handle); None: the caller's alone.

        device_tester: of an engine whose logits stay on the device. synthetic: accepts drafts instead of the target.
        """
        spec = engine.spec
        self._sampling = sampling
        self._policy = policy
        self._max_draft_len = max_draft_len
        self._clock = clock
        self._builder = BatchBuilder(spec.max_batch_size, spec.max_num_tokens, spec.max_seq_len, block_table)
        self._pruner = Pruner(engine, policy)
        self.tokens_per_block = spec.tokens_per_block
        self._vocab_size = spec.vocab_size
        self._device_tester = device_tester
        self.takes_guides = device_tester is None  # masks are on the host
        self.is_synthetic = synthetic is not None
        tester = device_tester or accept.Acceptor(spec.max_batch_size, spec.vocab_size, max_draft_len, pool=pool)
        self._tester: Tester = tester
        if synthetic is not None:
            probabilities = place_probabilities(synthetic.acceptance, max_draft_len)
            self._tester = SyntheticAcceptor(tester, probabilities, synthetic.seed)

    def verify(self, plan: SchedulerOutput, drafting: Drafting) -> VerifyResult:
        """Run the pass and the free test. Unless the mode is serial, the pass runs while drafting goes on: the frontier
        is then what was pending before, and the free test already sees what was drafted meanwhile."""
        started = self._clock.now_s()
        drafts = drafting.result() if plan.mode is Mode.SERIAL else None
        num_scheduled, verified = len(plan.scheduled), plan.verified
        frontiers = self._frontiers(plan, verified, drafts)
        lengths = _spread(frontiers, verified, num_scheduled, 0)
        tested = self._fill(plan, lengths)
        begun = self._clock.now_s()
        logits = None
        num_pruned: Sequence[int] = []
        if self._builder.num_requests:
            logits, num_pruned = self._pruner.forward(plan, self._builder.build(), frontiers)
        verify_ms = 1e3 * (self._clock.now_s() - begun)
        if num_pruned:
            lengths = _spread(frontiers, verified, num_scheduled, 0)
            num_pruned = _spread(num_pruned, verified, num_scheduled, 0)
        overlapped = drafts is None
        drafts = drafting.result()
        step_ms = 1e3 * (self._clock.now_s() - started) + (0.0 if overlapped else drafts.draft_ms)
        for index in tested:
            request = plan.scheduled[index].request
            pending = request.num_drafts + drafts.num_new_drafts[index]
            num_rows = 1 + lengths[index]
            if request.params.guide is not None:
                self._sampling.guided.prepare(request.slot, request.num_tokens, num_rows)
            self._tester.add(request.slot, num_rows, request.num_tokens, pending)
        return self._collect(plan, lengths, num_pruned, tested, logits, (verify_ms, step_ms))

    def _frontiers(self, plan: SchedulerOutput, verified: Sequence[int], drafts: DraftResult | None) -> list[int]:
        """Drafts to verify per decoding request of the plan's view."""
        scheduled = plan.scheduled
        if drafts is None:
            pending = [request.num_drafts for request in plan.view.decoding]
        else:
            pending = [scheduled[i].request.num_drafts + drafts.num_new_drafts[i] for i in verified]
        if not any(pending):
            return pending
        wanted = self._policy.frontier_lengths(plan.view, pending)
        return [
            max(0, min(length, limit, scheduled[i].max_verified))
            for i, length, limit in zip(verified, wanted, pending, strict=True)
        ]

    def _fill(self, plan: SchedulerOutput, lengths: Sequence[int]) -> list[int]:
        """Fill the batch -> indices of the requests that reach their end. lengths: drafts to run rows for."""
        builder = self._builder
        builder.clear()
        self._tester.clear()
        tested = []
        for index, scheduled in enumerate(plan.scheduled):
            num_new_tokens = scheduled.num_new_tokens
            if not num_new_tokens:
                continue
            request, length = scheduled.request, lengths[index]
            computed = request.num_computed_tokens
            end = computed + num_new_tokens
            if end == request.num_tokens:
                builder.add(request.slot, request.tokens, computed, end + length, 1 + length)
                tested.append(index)
            else:
                builder.add(request.slot, request.tokens, computed, end, 0)
        return tested

    def _collect(
        self,
        plan: SchedulerOutput,
        lengths: Sequence[int],
        num_pruned: Sequence[int],
        tested: list[int],
        logits: npt.NDArray[np.float32] | None,
        times_ms: tuple[float, float],
    ) -> VerifyResult:
        n = len(plan.scheduled)
        zeros, falses, empty = (0,) * n, (False,) * n, ("",) * n
        verify_ms, step_ms = times_ms
        if not tested:
            return VerifyResult(((),) * n, zeros, zeros, lengths, falses, empty, falses, num_pruned, verify_ms, step_ms)
        assert logits is not None
        begun = self._clock.now_s()
        found = self._tester.run(self._sampling.array, logits)
        test_ms = 1e3 * (self._clock.now_s() - begun)
        if self._device_tester is not None:
            verify_ms = max(verify_ms, self._device_tester.pass_ms)
        else:
            verify_ms += test_ms  # a cost table's pass includes it
        token_ids: Sequence[Sequence[int]] = _spread(found.token_ids.tolist(), tested, n, ())
        num_tokens = _spread(found.num_tokens.tolist(), tested, n, 0)
        num_accepted = _spread(found.num_accepted.tolist(), tested, n, 0)
        outcomes: list[int] = found.outcome.tolist()
        carried: Sequence[bool] = falses
        if CARRIED in outcomes:
            carried = _spread([outcome == CARRIED for outcome in outcomes], tested, n, False)
        failed: Sequence[str] = empty
        exhausted: Sequence[bool] = falses
        completed: frozenset[int] = frozenset()
        if FAILED in outcomes:
            failed, exhausted, completed = self._failures(plan, tested, found)
        return VerifyResult(
            token_ids,
            num_tokens,
            num_accepted,
            lengths,
            carried,
            failed,
            exhausted,
            num_pruned,
            verify_ms,
            step_ms + test_ms,
            self._keep_rows(plan, tested, lengths, num_tokens, token_ids, logits),
            completed,
        )

    def _failures(
        self, plan: SchedulerOutput, tested: list[int], found: AcceptResult
    ) -> tuple[list[str], list[bool], frozenset[int]]:
        """What VerifyResult has as failed, exhausted and completed, where some row failed."""
        failed, exhausted = [""] * len(plan.scheduled), [False] * len(plan.scheduled)
        completed = set()
        for row, index in enumerate(tested):
            if found.outcome[row] != FAILED:
                continue
            if found.row_status[row] != accept.RowStatus.EMPTY:
                failed[index] = NAN_LOGITS
                continue
            exhausted[index] = True
            request, guided = plan.scheduled[index].request, self._sampling.guided
            if request.params.guide is not None:
                position = request.num_tokens + int(found.num_tokens[row])
                failed[index] = guided.error(request.slot, position)
                if guided.is_complete(request.slot, position):
                    completed.add(index)
        return failed, exhausted, frozenset(completed)

    def _keep_rows(
        self,
        plan: SchedulerOutput,
        tested: list[int],
        lengths: Sequence[int],
        num_tokens: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        logits: npt.NDArray[np.float32],
    ) -> dict[int, KeptRows]:
        """By index, of the requests that keep rows."""
        kept_rows: dict[int, KeptRows] = {}
        keeping = [index for index in tested if plan.scheduled[index].request.keeps_rows]
        if keeping:
            first_rows = dict(zip(tested, accumulate((1 + lengths[i] for i in tested), initial=0), strict=False))
            for index in keeping:
                first_row = first_rows[index]
                rows = logits[first_row : first_row + num_tokens[index], : self._vocab_size]
                kept_rows[index] = self._kept_rows(plan.scheduled[index].request, rows, token_ids[index])
        return kept_rows

    def _kept_rows(self, request: Request, logits: npt.NDArray[np.float32], token_ids: Sequence[int]) -> KeptRows:
        """logits [num_tokens, vocab_size]: of the rows that gave the first tokens of token_ids."""
        params = request.params
        log_probs = []
        if params.return_log_probs:
            sampling = self._sampling.array[request.slot : request.slot + 1].copy()
            if not params.normalize_log_probs:
                sampling["mode"] = SEEDED  # any but greedy, whose law is all at the argmax
                sampling["temperature"] = params.temperature or 1.0
                sampling["top_k"], sampling["top_p"], sampling["min_p"] = 0, 1.0, 0.0
            probs = np.empty(self._vocab_size, np.float32)
            for place, row in enumerate(logits):
                next_token_probs(sampling, 0, row, request.num_tokens + place, probs)
                prob = probs[token_ids[place]]
                log_probs.append(math.log(prob) if prob > 0 else -math.inf)  # 0 only if acceptance is synthetic
        return KeptRows(log_probs, [row.copy() for row in logits] if params.return_generation_logits else ())


def _spread(values: Sequence[T], indices: Sequence[int], num_places: int, missing: T) -> Sequence[T]:
    """values[k] at place indices[k], which ascend, and missing at the others."""
    if len(indices) == num_places:
        return values
    places = [missing] * num_places
    for index, value in zip(indices, values, strict=True):
        places[index] = value
    return places
