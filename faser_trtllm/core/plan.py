"""The values that one step passes from schedule to draft, verify and update, and the record of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import field, replace

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.counts import DRAFTERS, NUM_COMPUTED, NUM_DRAFT_COMPUTED, NUM_DRAFTS, NUM_TOKENS, Int32Array
from faser_trtllm.core.decision import Decision, Mode, StepView
from faser_trtllm.core.request import FinishReason, Request, Top, counts_of
from faser_trtllm.core.value import value


@value
class ScheduledRequest:
    """One request's share of a step."""

    request: Request
    num_new_tokens: int  # committed tokens to run: tokens[num_computed_tokens :][: num_new_tokens]; 0: only drafts
    num_drafts: int  # pending drafts wanted in this step; KV blocks for them are allocated. 0 in a context chunk
    max_verified: int  # how many of them the pass may run rows for; less than num_drafts only if rows run short

    @property
    def reaches_end(self) -> bool:
        """The pass runs the last committed token, so it yields the next one."""
        return self.request.num_computed_tokens + self.num_new_tokens == self.request.num_tokens


class ScheduledRequests:
    """The requests of a step, one column per field, in the one order that all parts of the step share.

    The order is: first the num_decoding requests whose drafts the pass verifies, then prompts whose last token it runs,
    other prompts, and last requests that are only drafted for. The pass yields a next token for the first num_sampled
    requests, and has rows of the first num_running. Each part of the step can thus work on a prefix of the columns.

    Columns are int32 [num_requests], contiguous, with counts as they were when the step was scheduled:
        num_tokens (committed), num_pending (drafts);
        num_computed, num_draft_computed: tokens with KV of the target and of the draft model;
        num_new_tokens, num_drafts, max_verified: see ScheduledRequest;
        max_model_drafts: number of pending drafts up to which the draft model drafts.
    counts [DRAFTERS + 1, num_requests] has the first columns in the order of core/counts.py, and bits of the drafters
    that may draft (native.SOURCES).
    """

    __slots__ = (
        "counts",
        "max_model_drafts",
        "max_verified",
        "num_computed",
        "num_decoding",
        "num_draft_computed",
        "num_drafts",
        "num_new_tokens",
        "num_pending",
        "num_running",
        "num_sampled",
        "num_tokens",
        "requests",
        "slots",
    )

    def __init__(
        self,
        requests: Sequence[Request],
        slots: Int32Array,
        counts: Int32Array,
        num_new_tokens: Int32Array,
        num_drafts: Int32Array,
        max_verified: Int32Array,
        parts: Sequence[int],
        max_model_drafts: Int32Array | None = None,
    ) -> None:
        """counts: [num_requests, NUM_COUNTS]. parts: num_decoding, num_sampled, num_running. max_model_drafts: by
        default num_drafts."""
        self.requests, self.slots = requests, slots
        columns = self.counts = counts[:, : DRAFTERS + 1].T.copy()
        self.num_tokens, self.num_pending = columns[NUM_TOKENS], columns[NUM_DRAFTS]
        self.num_computed, self.num_draft_computed = columns[NUM_COMPUTED], columns[NUM_DRAFT_COMPUTED]
        self.num_new_tokens, self.num_drafts, self.max_verified = num_new_tokens, num_drafts, max_verified
        self.max_model_drafts = num_drafts if max_model_drafts is None else max_model_drafts
        self.num_decoding, self.num_sampled, self.num_running = parts

    @staticmethod
    def of(items: Sequence[ScheduledRequest], model_lengths: Mapping[int, int] | None = None) -> ScheduledRequests:
        """Return the requests' shares as columns in the class's order. model_lengths: see Decision."""
        requests = [item.request for item in items]
        counts = counts_of(requests)
        columns = [[request.slot for request in requests], [item.num_new_tokens for item in items]]
        columns += [[item.num_drafts for item in items], [item.max_verified for item in items]]
        if model_lengths is not None:
            wanted = zip(columns[0], columns[2], strict=True)
            columns.append([min(model_lengths.get(slot, 0), num_drafts) for slot, num_drafts in wanted])
        shares = np.array(columns, np.int32)
        reaches_end = counts[:, NUM_COMPUTED] + shares[1] == counts[:, NUM_TOKENS]
        parts = np.select([shares[1] == 0, ~reaches_end, shares[1] > 1], [3, 2, 1], 0)
        order = np.argsort(parts, kind="stable")
        slots, num_new_tokens, num_drafts, max_verified, *of_model = shares.take(order, 1)
        return ScheduledRequests(
            [requests[index] for index in order.tolist()],
            slots,
            counts[order],
            num_new_tokens,
            num_drafts,
            max_verified,
            np.searchsorted(parts[order], [1, 2, 3]).tolist(),
            of_model[0] if of_model else None,
        )

    def within(self, window: int) -> ScheduledRequests:
        """Return a copy for a draft model with this context window: it neither runs nor drafts for longer requests."""
        if not (self.num_tokens + self.max_model_drafts > window).any():
            return self
        rows = copy(self)
        rows.max_model_drafts = np.minimum(self.max_model_drafts, window - self.num_tokens)
        rows.counts = self.counts.copy()
        rows.counts[DRAFTERS, self.num_tokens >= window] &= ~(1 << native.BY_MODEL)
        return rows

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        columns = (self.num_new_tokens, self.num_drafts, self.max_verified)
        return map(ScheduledRequest, self.requests, *(column.tolist() for column in columns))


@value
class SchedulerOutput:
    """The plan of one step, and what scheduling it changed."""

    scheduled: ScheduledRequests
    view: StepView  # its decoding requests are the first of scheduled; while a plan is held, the view it was made from
    decision: Decision
    admitted: tuple[Request, ...] = ()  # got a slot in this step (first admission or after preemption)
    paused: tuple[Request, ...] = ()  # preempted in this step; their blocks are free again
    is_drafting: bool = True  # without drafting, prompts skip the draft model too
    finished: tuple[Request, ...] = ()  # ended without running: cancelled, or timed out in the queue

    @property
    def mode(self) -> Mode:
        return self.decision.mode

    @property
    def runs_draft_model(self) -> bool:
        """The draft model runs in this step, if only to keep up with prompts."""
        lengths = self.decision.model_lengths
        return self.is_drafting and (lengths is None or bool(lengths))


@value
class DraftResult:
    """The drafts of a step. Columns are int32 [num_requests], in the order of SchedulerOutput.scheduled."""

    num_new_drafts: Int32Array
    num_draft_computed: Int32Array  # tokens that the draft model's KV now covers
    draft_ms: float = 0.0
    num_rows: int = 0  # of the draft model's first pass: committed tokens it had not seen
    num_asked: int = 0  # requests that the draft model was asked to draft for
    num_free: Int32Array | None = None  # the part of num_new_drafts that took no step of a draft model; None: none
    free_ms: float = 0.0  # time to find those


@value
class KeptRows:
    """Log probs and logits that a request keeps, one entry per committed token; fields not requested are empty."""

    log_probs: Sequence[float] = ()  # see SamplingParams
    tops: Sequence[Top] = ()  # the most probable tokens at each position
    logits: Sequence[npt.NDArray[np.float32]] = ()  # [vocab_size] each
    context_log_probs: Sequence[float] = ()  # of the prompt tokens that follow the rows of this pass
    context_tops: Sequence[Top] = ()


@value
class Ended:
    """The end of a request that the target cannot continue: the reason, and for ERROR one sentence for the client.

    is_kv_wrong: the request's KV may have led to it, so no other request may reuse it.
    """

    reason: FinishReason
    error: str | None = None
    is_kv_wrong: bool = False


@value
class OutputEnd:
    """The final counts of a request that its output sink ends."""

    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int


@value
class VerifyResult:
    """The results of a target pass. Columns are int32, in the order of SchedulerOutput.scheduled.

    The arrays of the num_sampled requests may be overwritten in the next step; other requests commit nothing. In a
    StepRecord, num_tokens and num_accepted count only what is part of the output: tokens up to the one that ends a
    request, and the drafts before it (see up_to).
    """

    token_ids: Int32Array  # [num_sampled, width] the first num_tokens[i] are committed, num_accepted[i] of them drafts
    num_tokens: Int32Array  # [num_sampled]
    num_accepted: Int32Array  # [num_sampled]
    outcome: Int32Array  # [num_sampled] ops/accept.py Outcome
    num_verified: Int32Array  # [num_requests] pending drafts whose rows ran to the end of the pass
    num_pruned: Int32Array | None = None  # [num_requests] rows dropped at segment boundaries; None: none
    verify_ms: float = 0.0
    step_ms: float = 0.0  # drafting and verifying together
    ended: Mapping[int, Ended] = field(default_factory=dict)  # by index, requests that end whatever their tokens are
    kept_rows: Mapping[int, KeptRows] = field(default_factory=dict)  # by index
    num_branches: int = 0  # rows of the pass next to the chains of drafts
    num_followed: int = 0  # branches that yielded a token
    num_cut_drafts: int = 0  # drafts after the ends of outputs
    num_experts: float = 0.0  # Engine.distinct_experts of the pass

    def up_to(self, places: Mapping[int, int], pending: Int32Array) -> VerifyResult:
        """Return a copy without what follows the ends of outputs.

        places: by index, how many tokens are part of the output, up to and including the one that ended it; 0: it had
        ended before. pending [num_requests]: drafts that were verified or could have been.
        """
        num_tokens, num_accepted, outcome = self.num_tokens.copy(), self.num_accepted.copy(), self.outcome.copy()
        num_cut = 0
        for index, place in places.items():
            if place <= num_accepted[index]:
                num_cut += int(pending[index]) - place
                num_accepted[index], outcome[index] = max(0, place - 1), native.BONUS  # no draft stays
            num_tokens[index] = min(num_tokens[index], place)
        return replace(self, num_tokens=num_tokens, num_accepted=num_accepted, outcome=outcome, num_cut_drafts=num_cut)

    def num_settled(self, pending: Int32Array) -> int:
        """Return how many drafts are no longer pending, except those after ends of outputs. pending: see up_to."""
        settled = np.where(self.outcome == native.STILL_PENDING, self.num_accepted, pending[: self.outcome.size])
        return int(settled.sum()) - self.num_cut_drafts


@value
class StepRecord:
    """One finished step, with its sums, for everything that watches the executor."""

    plan: SchedulerOutput
    drafts: DraftResult
    result: VerifyResult
    begun_s: float
    scheduled_s: float  # end of scheduling
    verified_s: float  # end of drafting and verification
    updated_s: float  # end of the update
    num_drafted: int
    num_verified: int  # draft rows that ran to the end of the pass
    num_pruned: int  # draft rows that were dropped
    num_accepted: int
    num_tokens: int  # committed
    num_decoded: int  # committed by decoding requests
    num_context_rows: int  # rows of prompts, and of preempted requests that run their tokens again

    @staticmethod
    def of(
        plan: SchedulerOutput, drafts: DraftResult, result: VerifyResult, times_s: tuple[float, float, float, float]
    ) -> StepRecord:
        """Return the record of a step, with its sums. times_s: begun_s, scheduled_s, verified_s and updated_s."""
        rows, num_tokens = plan.scheduled, result.num_tokens.tolist()
        n, num_decoded, num_context_rows = rows.num_decoding, sum(num_tokens), 0
        total = num_decoded
        if n < len(rows):
            num_decoded, num_context_rows = sum(num_tokens[:n]), int(rows.num_new_tokens.sum()) - n
        return StepRecord(
            plan,
            drafts,
            result,
            *times_s,
            num_drafted=sum(drafts.num_new_drafts.tolist()),
            num_verified=sum(result.num_verified.tolist()),
            num_pruned=0 if result.num_pruned is None else int(result.num_pruned.sum()),
            num_accepted=sum(result.num_accepted.tolist()),
            num_tokens=total,
            num_decoded=num_decoded,
            num_context_rows=num_context_rows,
        )

    @property
    def num_rows(self) -> int:
        """Target rows of the pass, branches included."""
        return self.plan.scheduled.num_decoding + self.num_context_rows + self.num_verified + self.result.num_branches


@value
class RequestOutput:
    """New committed tokens of a request; finish_reason is set with the last of them."""

    request: Request
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
