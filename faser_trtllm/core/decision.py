"""The frozen values that a policy takes and returns: the state of a step, its decision, and the outcome of a plan."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.counts import Int32Array
from faser_trtllm.core.request import Request
from faser_trtllm.core.value import value


class Mode(str, enum.Enum):
    """How drafting and verification share the processor in a step."""

    SERIAL = "serial"  # draft, then verify, each on every core
    DRAFT_AHEAD = "draft_ahead"  # verify what is pending while the draft extends it
    PING_PONG = "ping_pong"  # verify one half of the requests while the other half is drafted


UNLIMITED = 1 << 30  # rows


@value
class StepView:
    """The state of a step before a policy decides. Times of a request: request.arrival_s, request.deadline_s."""

    decoding: Sequence[Request]  # requests that may draft and verify in this step
    num_context_rows: int  # prompt rows that want to run in the same pass, newcomers' included, at most
    num_waiting: int  # requests without a slot
    now_s: float
    num_joining: int = 0  # requests whose prompts are being run, or wait and will find a slot: they decode next
    num_free_rows: int = UNLIMITED  # of the pass that no prompt wants: drafts beyond them displace prompts


@value
class DraftStop:
    """When drafting ends early, decided inside the one draft call.

    A draft at place j (0 is the first pending one) with margin m (Request.draft_margins), of a request with
    SamplingMode s, is estimated to be accepted with probability sigmoid(slope[s, j] * m + intercept[s, j]); survival is
    the product along the request. What the next draft's margin will say is not known yet: its probability is taken to
    be prior[s, j + 1] + spread[s, j + 1] or prior - spread, either as likely, and its row is run only where it pays. So
    after each draft the next one is expected to be worth the mean of max(0, survival x probability - row_price[j + 1])
    over the two. A request stops when neither pays; all stop when the sum over those that would go on is less than
    step_price[their number]. Arrays are float32: slope, intercept, prior and spread [NUM_MODES, max_draft_len],
    row_price [max_draft_len], step_price [max_batch_size + 1]; prices in tokens (price x ms of a target row, and of a
    draft step).
    """

    slope: npt.NDArray[np.float32]
    intercept: npt.NDArray[np.float32]
    prior: npt.NDArray[np.float32]
    spread: npt.NDArray[np.float32]
    row_price: npt.NDArray[np.float32]
    step_price: npt.NDArray[np.float32]


@value
class PruneRule:
    """Tells which drafts of a running pass keep the row after them at a segment boundary; ops/prune_rows.py applies it.

    The log-odds that a draft is accepted are rank * its place among its candidates + gap * the best candidate's score
    minus its own + survival * before + intercept. Rows go on up to the first draft where the product of these
    probabilities along the request is below `least`. before [num_drafts] fp32: log-odds from before the pass, of all
    requests in turn. record: told the ranks [num_drafts] int32 and gaps [num_drafts] fp32, on the host.
    """

    before: npt.NDArray[np.float32]
    rank: float = 0.0
    gap: float = 0.0
    survival: float = 0.0
    intercept: float = 0.0
    least: float = 0.0
    record: Callable[[npt.NDArray[np.int32], npt.NDArray[np.float32]], None] | None = None

    def weights(self) -> npt.NDArray[np.float32]:
        """rank, gap, survival, intercept, least."""
        return np.array([self.rank, self.gap, self.survival, self.intercept, self.least], np.float32)


class VerificationLengths(Protocol):
    """Chooses how many drafts of each request a pass verifies; see ops/best_slots.py. Arrays [num_requests] int32."""

    def lengths(
        self, sampling: npt.NDArray[np.void], slots: Int32Array, num_tokens: Int32Array, num_pending: Int32Array
    ) -> Int32Array:
        """0 to num_pending[i] each; a request's drafts follow its num_tokens[i] committed tokens."""


class Exits(Protocol):
    """Chooses the rows that a running pass goes on with; see ops/prune_rows.py.

    boundaries: indices into EngineSpec.segments at which it is asked.
    """

    @property
    def boundaries(self) -> Sequence[int]: ...

    def rule(
        self,
        sampling: npt.NDArray[np.void],
        slots: Int32Array,
        num_tokens: Int32Array,
        num_drafts: Int32Array,
        boundary: int,
    ) -> PruneRule:
        """For the first num_drafts[i] pending drafts of each request, which follow num_tokens[i] committed tokens."""


class VerifiedDrafts(Protocol):
    """Sums up what rejection sampling found; see ops/tested.py."""

    def add(
        self,
        sampling: npt.NDArray[np.void],
        slots: Int32Array,
        num_tokens: Int32Array,
        num_accepted: Int32Array,
        outcome: Int32Array,
    ) -> None: ...


@value
class Decision:
    """A policy's decision for a step, and for num_held further ones while the same requests decode and nobody joins
    or waits. plan() need not be called for those; it may be.

    lengths: pending drafts wanted per decoding request (callers clamp to Request.draft_limit). stop: when drafting ends
    early. verification: how many of the pending drafts are verified; None: all. exits: where rows are dropped inside
    the pass; None: nowhere. tested: where the drafts that were tested are summed up; None: nowhere. model_lengths: by
    slot, up to how many pending drafts the draft model drafts, where other drafters may go on for nothing (a slot that
    is missing: 0; empty: it does not run at all); None: as lengths.
    """

    lengths: Sequence[int]
    stop: DraftStop | None = None
    verification: VerificationLengths | None = None
    exits: Exits | None = None
    tested: VerifiedDrafts | None = None
    mode: Mode = Mode.SERIAL
    num_held: int = 0
    price: float = 0.0  # tokens per ms that are expected; 0 if nothing is
    model_lengths: Mapping[int, int] | None = None


@value
class PlanStats:
    """The time and the tokens of a plan's steps, by counters and clock; steps right after a change between drafting and
    not drafting are left out.

    ms: of the whole steps, the host's time included. num_tokens: committed. num_requests, num_rows, num_verified,
    num_pruned, num_accepted: sums over the steps of decoding requests, target rows, drafts that the passes ran to the
    end, rows dropped on the way, and drafts that passed. num_draft_calls and num_draft_rows: draft calls and the rows
    of their first steps; num_draft_steps: all their steps; num_drafted: drafts made. num_context_rows: target rows of
    prompts, next to num_rows. A plan is made anew in a step that runs prompts, so either all of its steps do or none.

    num_experts: distinct experts of a layer, summed over the passes; 0: none are counted.

    Fields with late are of the draft calls that made up for tokens which the draft model had missed, also of steps that
    are not counted otherwise: calls, rows of their first steps, all their steps, drafts made, and ms.
    """

    num_steps: int = 0
    ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    num_tokens: int = 0
    num_requests: int = 0
    num_rows: int = 0
    num_verified: int = 0
    num_pruned: int = 0
    num_accepted: int = 0
    num_draft_calls: int = 0
    num_draft_rows: int = 0
    num_draft_steps: int = 0
    num_drafted: int = 0
    num_context_rows: int = 0
    num_late_calls: int = 0
    num_late_rows: int = 0
    num_late_steps: int = 0
    num_late_drafted: int = 0
    late_ms: float = 0.0
    num_experts: float = 0.0
