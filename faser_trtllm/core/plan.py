"""The frozen values that a step passes from schedule to draft, verify and update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import overload

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.counts import NUM_COMPUTED, NUM_DRAFT_COMPUTED, NUM_DRAFTS, NUM_TOKENS
from faser_trtllm.core.decision import DraftStop, Exits, Frontier, Mode, StepView, TestedDrafts
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


class ScheduledRequests(Sequence[ScheduledRequest]):
    """The requests of a step with their shares, a list per field, and as values to whoever loops.

    slots, num_tokens, num_pending and num_computed are as they were when the step was scheduled; so are the arrays
    slot_array [num_requests] and counts [num_requests, NUM_COUNTS] (core/counts.py), both int32.
    """

    __slots__ = (
        "_items",
        "counts",
        "max_verified",
        "num_computed",
        "num_drafts",
        "num_new_tokens",
        "num_pending",
        "num_tokens",
        "requests",
        "slot_array",
        "slots",
    )

    def __init__(
        self,
        requests: Sequence[Request],
        num_new_tokens: Sequence[int],
        num_drafts: Sequence[int],
        max_verified: Sequence[int],
        *,
        slots: npt.NDArray[np.int32] | None = None,
        counts: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """As ScheduledRequest has them. slots, counts: of the requests, if they are at hand."""
        self.requests = requests
        self.num_new_tokens, self.num_drafts, self.max_verified = num_new_tokens, num_drafts, max_verified
        if slots is None:
            slots = np.array([request.slot for request in requests], np.int32)
        if counts is None:
            counts = counts_of(requests)
        self.slot_array, self.counts = slots, counts
        self.slots: list[int] = slots.tolist()
        self.num_tokens: list[int] = counts[:, NUM_TOKENS].tolist()  # committed
        self.num_pending: list[int] = counts[:, NUM_DRAFTS].tolist()  # drafts, before those of this step
        self.num_computed: list[int] = counts[:, NUM_COMPUTED].tolist()  # tokens that have the target's KV
        self._items: tuple[ScheduledRequest, ...] | None = None

    @property
    def num_draft_computed(self) -> list[int]:
        """Tokens that have the draft model's KV."""
        counts: list[int] = self.counts[:, NUM_DRAFT_COMPUTED].tolist()
        return counts

    @staticmethod
    def of(items: Sequence[ScheduledRequest]) -> ScheduledRequests:
        return ScheduledRequests(
            [s.request for s in items],
            [s.num_new_tokens for s in items],
            [s.num_drafts for s in items],
            [s.max_verified for s in items],
        )

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self._values())

    @overload
    def __getitem__(self, index: int) -> ScheduledRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ScheduledRequest]: ...
    def __getitem__(self, index: int | slice) -> ScheduledRequest | Sequence[ScheduledRequest]:
        return self._values()[index]

    def _values(self) -> tuple[ScheduledRequest, ...]:
        if self._items is None:
            columns = (self.requests, self.num_new_tokens, self.num_drafts, self.max_verified)
            self._items = tuple(map(ScheduledRequest, *columns))
        return self._items


@value
class SchedulerOutput:
    scheduled: ScheduledRequests
    view: StepView  # its decoding requests are those of scheduled that are verified in this step, in order; of a step
    # whose plan is held, the view that it was planned by
    admitted: tuple[Request, ...] = ()  # got a slot in this step (first admission or after preemption)
    paused: tuple[Request, ...] = ()  # preempted in this step; their blocks are free again
    mode: Mode = Mode.SERIAL
    stop: DraftStop | None = None
    is_drafting: bool = True  # without drafting, prompts skip the draft model too
    finished: tuple[Request, ...] = ()  # ended without running: cancelled, or the deadline passed in the queue
    begun_s: float | None = None  # when the step was scheduled, if later than its view: the plan is held
    frontier: Frontier | None = None  # of the plan's decision, as are the next three
    exits: Exits | None = None
    tested: TestedDrafts | None = None
    model_lengths: Mapping[int, int] | None = None

    @property
    def runs_draft_model(self) -> bool:
        """Whether the draft model is used at all, if only to keep up with prompts."""
        return self.is_drafting and (self.model_lengths is None or bool(self.model_lengths))

    @property
    def num_rows(self) -> int:
        """Target rows of the step, drafts included, at most."""
        return sum(self.scheduled.num_new_tokens) + sum(self.scheduled.max_verified)

    @property
    def verified(self) -> Sequence[int]:
        """Indices of view.decoding in scheduled, by the counts from when the step was scheduled: `update` changes the
        requests' own, and a prompt that has ended decodes from then on."""
        rows = self.scheduled
        if len(self.view.decoding) == len(rows):
            return range(len(rows))
        columns = zip(rows.num_new_tokens, rows.num_computed, rows.num_tokens, strict=True)
        return [i for i, (new, computed, known) in enumerate(columns) if new == 1 and computed == known - 1]


@value
class DraftResult:
    """What drafting did, in the order of SchedulerOutput.scheduled."""

    num_new_drafts: Sequence[int]
    num_draft_computed: Sequence[int]  # number of tokens that the draft model's KV now covers
    draft_ms: float = 0.0
    num_rows: int = 0  # of the draft model's first pass: known tokens it had not seen
    num_asked: int = 0  # requests that the draft model was asked to draft for
    num_free: Sequence[int] = ()  # of num_new_drafts, those that took no step of a draft model; empty: none
    free_ms: float = 0.0  # to find those


@value
class KeptRows:
    """What is kept of the rows that produced a request's committed tokens, one entry per token.

    log_probs: see SamplingParams. tops: beside them. logits: [vocab_size] fp32 each. context_log_probs, context_tops:
    of the prompt's tokens that follow the rows of this pass. Fields that were not requested are empty.
    """

    log_probs: Sequence[float] = ()
    tops: Sequence[Top] = ()
    logits: Sequence[npt.NDArray[np.float32]] = ()
    context_log_probs: Sequence[float] = ()
    context_tops: Sequence[Top] = ()


@value
class VerifyResult:
    """What a target pass found, in the order of SchedulerOutput.scheduled.

    token_ids [num_requests, width] int32: the first num_tokens[i] are committed, and the first num_accepted[i] were
    drafts; the array may be written again in the next step.
    carried[i]: untested drafts stay pending. A context chunk that does not reach the end of the prompt has num_tokens
    0. failed[i]: one sentence if the request cannot continue, else "". exhausted[i]: no token was allowed (all banned),
    so the request ends with "length". kept_rows: by i, only for requests that keep rows. completed: those of exhausted
    whose guide is at its end, so that they end with "stop".
    """

    token_ids: npt.NDArray[np.int32]
    num_tokens: Sequence[int]
    num_accepted: Sequence[int]
    num_verified: Sequence[int]  # pending drafts whose rows the pass ran to the end (L)
    carried: Sequence[bool]
    failed: Sequence[str]
    exhausted: Sequence[bool]
    num_pruned: Sequence[int] = ()  # rows dropped at segment boundaries; empty if none
    verify_ms: float = 0.0
    step_ms: float = 0.0  # drafting and verifying together
    kept_rows: Mapping[int, KeptRows] = field(default_factory=dict)
    completed: frozenset[int] = frozenset()
    num_pending: Sequence[int] = ()  # drafts that the test could see (empty: none of any request)
    num_branches: int = 0  # rows of the pass beside the chains of drafts
    num_followed: int = 0  # of these, those that yielded a token


@value
class RequestOutput:
    """New tokens of a request, as the scheduler committed them; finish_reason is set on the last one."""

    request: Request
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
