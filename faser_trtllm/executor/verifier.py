"""The verifying half of a step: one target pass over all frontiers and context chunks, then the free test."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.core.plan import DraftResult, SchedulerOutput, VerifyResult
from faser_trtllm.engine.base import Engine
from faser_trtllm.ops import accept
from faser_trtllm.policy.base import Policy
from faser_trtllm.sampling.table import SamplingTable

NAN_LOGITS = "the target model returned NaN or infinite logits for this request; check the checkpoint's weights"


class Verifier:
    """Runs the rows that the plan and the policy give each request, and tests what they reached."""

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingTable,
        policy: Policy,
        block_table: npt.NDArray[np.int32],
        max_draft_len: int,
    ) -> None:
        spec = engine.spec
        self._engine = engine
        self._sampling = sampling
        self._policy = policy
        self._max_draft_len = max_draft_len
        self._builder = BatchBuilder(spec.max_batch_size, spec.max_num_tokens, spec.max_seq_len, block_table)
        self._tester = accept.Acceptor(spec.max_batch_size, spec.vocab_size, max_draft_len)

    def verify(self, plan: SchedulerOutput, drafts: DraftResult) -> VerifyResult:
        frontiers = self._frontiers(plan, drafts)
        builder, tester = self._builder, self._tester
        builder.clear()
        tester.clear()
        tested: list[int] = []
        for index, scheduled in enumerate(plan.scheduled):
            request = scheduled.request
            computed = request.num_computed_tokens
            end = computed + scheduled.num_new_tokens
            if end < request.num_tokens:
                builder.add(request.slot, request.tokens, computed, end, 0)
                continue
            num_verified = frontiers[index]
            builder.add(request.slot, request.tokens, computed, end + num_verified, 1 + num_verified)
            pending = request.num_drafts + drafts.num_new_drafts[index]
            tester.add(request.slot, 1 + num_verified, request.num_tokens, pending)
            tested.append(index)
        logits = self._engine.forward(builder.build())
        return self._collect(plan, frontiers, tested, logits)

    def _frontiers(self, plan: SchedulerOutput, drafts: DraftResult) -> list[int]:
        """Drafts to verify per scheduled request; context chunks have none."""
        frontiers = [0] * len(plan.scheduled)
        decoding = [i for i, s in enumerate(plan.scheduled) if s.request.is_decoding]
        pending = [plan.scheduled[i].request.num_drafts + drafts.num_new_drafts[i] for i in decoding]
        if any(pending):
            requests = [plan.scheduled[i].request for i in decoding]
            for i, length, limit in zip(
                decoding, self._policy.frontier_lengths(requests, pending), pending, strict=True
            ):
                frontiers[i] = max(0, min(length, limit, plan.scheduled[i].max_verified))
        return frontiers

    def _collect(
        self, plan: SchedulerOutput, frontiers: list[int], tested: list[int], logits: npt.NDArray[np.float32]
    ) -> VerifyResult:
        n = len(plan.scheduled)
        token_ids = np.zeros((n, self._max_draft_len + 1), np.int32)
        num_tokens, num_accepted, carried, exhausted = [0] * n, [0] * n, [False] * n, [False] * n
        failed = [""] * n
        if tested:
            found = self._tester.run(self._sampling.array, logits)
            token_ids[tested] = found.token_ids
            found_tokens, found_accepted = found.num_tokens.tolist(), found.num_accepted.tolist()
            outcomes = found.outcome.tolist()
            for row, index in enumerate(tested):
                num_tokens[index] = found_tokens[row]
                num_accepted[index] = found_accepted[row]
                if outcomes[row] == accept.Outcome.CARRIED:
                    carried[index] = True
                elif outcomes[row] == accept.Outcome.FAILED:
                    exhausted[index] = bool(found.row_status[row] == accept.RowStatus.EMPTY)
                    failed[index] = "" if exhausted[index] else NAN_LOGITS
        return VerifyResult(
            token_ids,
            tuple(num_tokens),
            tuple(num_accepted),
            tuple(frontiers),
            tuple(carried),
            tuple(failed),
            tuple(exhausted),
        )
