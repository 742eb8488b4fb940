"""The verifying half of a step: one target pass over all frontiers and context chunks, then the free test."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

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
from faser_trtllm.ops.law import next_token_probs
from faser_trtllm.ops.synthetic_accept import RowTester, SyntheticAcceptor, Tester, place_probabilities
from faser_trtllm.policy.base import Policy
from faser_trtllm.sampling.table import SamplingTable

CARRIED, FAILED = int(accept.Outcome.CARRIED), int(accept.Outcome.FAILED)  # comparing enums takes ten times as long
NAN_LOGITS = "the target model returned NaN or infinite logits for this request; check the checkpoint's weights"


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
        verified = plan.verified
        frontiers = self._frontiers(plan, verified, drafts)
        entries, tested = self._fill(plan, dict(zip(verified, frontiers, strict=True)))
        begun = self._clock.now_s()
        logits, num_pruned = None, [0] * len(verified)
        if self._builder.num_requests:
            logits, num_pruned = self._pruner.forward(plan, self._builder.build(), entries, frontiers)
        verify_ms = 1e3 * (self._clock.now_s() - begun)
        overlapped = drafts is None
        drafts = drafting.result()
        step_ms = 1e3 * (self._clock.now_s() - started) + (0.0 if overlapped else drafts.draft_ms)
        lengths = dict(zip(verified, frontiers, strict=True))
        for index in tested:
            request = plan.scheduled[index].request
            pending = request.num_drafts + drafts.num_new_drafts[index]
            num_rows = 1 + lengths.get(index, 0)
            if request.params.guide is not None:
                self._sampling.guided.prepare(request.slot, request.num_tokens, num_rows)
            self._tester.add(request.slot, num_rows, request.num_tokens, pending)
        pruned = dict(zip(verified, num_pruned, strict=True))
        return self._collect(plan, lengths, pruned, tested, logits, (verify_ms, step_ms))

    def _frontiers(self, plan: SchedulerOutput, verified: list[int], drafts: DraftResult | None) -> list[int]:
        """Drafts to verify per decoding request of the plan's view."""
        pending = [
            plan.scheduled[i].request.num_drafts + (drafts.num_new_drafts[i] if drafts is not None else 0)
            for i in verified
        ]
        if not any(pending):
            return pending
        wanted = self._policy.frontier_lengths(plan.view, pending)
        return [
            max(0, min(length, limit, plan.scheduled[i].max_verified))
            for i, length, limit in zip(verified, wanted, pending, strict=True)
        ]

    def _fill(self, plan: SchedulerOutput, frontiers: dict[int, int]) -> tuple[list[int], list[int]]:
        """Fill the batch -> batch entries of the decoding requests, indices of the requests that reach their end."""
        builder = self._builder
        builder.clear()
        self._tester.clear()
        entries, tested = [], []
        for index, scheduled in enumerate(plan.scheduled):
            request = scheduled.request
            if not scheduled.num_new_tokens:
                continue
            computed = request.num_computed_tokens
            end = computed + scheduled.num_new_tokens
            length = frontiers.get(index, 0)
            if index in frontiers:
                entries.append(builder.num_requests)
            num_logit_rows = 1 + length if end == request.num_tokens else 0
            builder.add(request.slot, request.tokens, computed, end + length, num_logit_rows)
            if num_logit_rows:
                tested.append(index)
        return entries, tested

    def _collect(
        self,
        plan: SchedulerOutput,
        frontiers: dict[int, int],
        pruned: dict[int, int],
        tested: list[int],
        logits: npt.NDArray[np.float32] | None,
        times_ms: tuple[float, float],
    ) -> VerifyResult:
        n = len(plan.scheduled)
        token_ids: list[list[int]] = [[]] * n
        num_tokens, num_accepted, carried, exhausted = [0] * n, [0] * n, [False] * n, [False] * n
        failed = [""] * n
        completed: set[int] = set()
        kept_rows: dict[int, KeptRows] = {}
        if tested:
            assert logits is not None
            begun = self._clock.now_s()
            found = self._tester.run(self._sampling.array, logits)
            verify_ms, step_ms = times_ms
            test_ms = 1e3 * (self._clock.now_s() - begun)
            if self._device_tester is not None:
                verify_ms = max(verify_ms, self._device_tester.pass_ms)
            else:
                verify_ms += test_ms  # a cost table's pass includes it
            times_ms = (verify_ms, step_ms + test_ms)
            found_ids = found.token_ids.tolist()
            found_tokens, found_accepted = found.num_tokens.tolist(), found.num_accepted.tolist()
            outcomes = found.outcome.tolist()
            first_row = 0
            for row, index in enumerate(tested):
                token_ids[index] = found_ids[row]
                num_tokens[index] = found_tokens[row]
                num_accepted[index] = found_accepted[row]
                if outcomes[row] == CARRIED:
                    carried[index] = True
                elif outcomes[row] == FAILED:
                    exhausted[index] = bool(found.row_status[row] == accept.RowStatus.EMPTY)
                    failed[index] = "" if exhausted[index] else NAN_LOGITS
                request = plan.scheduled[index].request
                if request.params.guide is not None and exhausted[index]:
                    position = request.num_tokens + num_tokens[index]
                    failed[index] = self._sampling.guided.error(request.slot, position)
                    if self._sampling.guided.is_complete(request.slot, position):
                        completed.add(index)
                if request.keeps_rows:
                    rows = logits[first_row : first_row + num_tokens[index], : self._vocab_size]
                    kept_rows[index] = self._kept_rows(request, rows, token_ids[index])
                first_row += 1 + frontiers.get(index, 0)
        return VerifyResult(
            token_ids,
            tuple(num_tokens),
            tuple(num_accepted),
            tuple(frontiers.get(i, 0) for i in range(n)),
            tuple(carried),
            tuple(failed),
            tuple(exhausted),
            tuple(pruned.get(i, 0) for i in range(n)),
            *times_ms,
            kept_rows,
            frozenset(completed),
        )

    def _kept_rows(self, request: Request, logits: npt.NDArray[np.float32], token_ids: list[int]) -> KeptRows:
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
