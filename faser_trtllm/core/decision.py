"""Values that a policy takes and returns: the state of a step, its decision, and the outcome of a plan."""

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


UNLIMITED = 1 << 30  # rows, as good as no limit


@value
class StepView:
    """The state of a step before a policy decides. A request has its own times: arrival_s and deadline_s."""

    decoding: Sequence[Request]  # requests that may draft and verify in this step
    num_context_rows: int  # upper limit on prompt rows for the same pass, those of newly admitted requests included
    num_waiting: int  # requests without a slot
    now_s: float
    num_joining: int = 0  # requests that decode next: their prompts are running, or they wait and a slot is free
    num_free_rows: int = UNLIMITED  # rows of the pass that no prompt needs: drafts beyond them displace prompts


@value
class DraftStop:
    """A rule that ends drafting early, applied inside the one draft call.

    A draft at position j (0 is the first pending one) with margin m (Request.draft_margins), of a request with
    SamplingMode s, is estimated to be accepted with probability sigmoid(slope[s, j] * m + intercept[s, j]). Survival is
    the product of these along the request. The next draft's margin is not known yet, so its probability is taken to be
    prior[s, j + 1] + spread[s, j + 1] or prior - spread with equal chances, and its row is run only if it pays. After
    each draft, the next one is therefore worth the mean over the two of max(0, survival x probability - row_price[j +
    1]). A request stops when neither pays. All stop when the sum over those that would go on is less than
    step_price[their number]. Prices are in tokens: price x ms of a target row, and of a draft step.
    """

    slope: npt.NDArray[np.float32]  # [NUM_MODES, max_draft_len], as are the next three
    intercept: npt.NDArray[np.float32]
    prior: npt.NDArray[np.float32]
    spread: npt.NDArray[np.float32]
    row_price: npt.NDArray[np.float32]  # [max_draft_len]
    step_price: npt.NDArray[np.float32]  # [max_batch_size + 1]


@value
class PruneRule:
    """Decides which drafts of a running pass keep the row after them at a boundary (applied by ops/prune_rows.py).

    The log-odds that a draft is accepted are rank * min(place among its candidates, 8) + gap * (the best candidate's
    score minus its own) + survival * before + intercept. Rows go on up to the first draft where the product of these
    probabilities along the request is below `least`.
    """

    before: npt.NDArray[np.float32]  # [num_drafts] log-odds from before the pass, request by request
    rank: float = 0.0
    gap: float = 0.0
    survival: float = 0.0
    intercept: float = 0.0
    least: float = 0.0
    # Called with the ranks [num_drafts] int32 and gaps [num_drafts] fp32, on the host.
    record: Callable[[npt.NDArray[np.int32], npt.NDArray[np.float32]], None] | None = None

    def weights(self) -> npt.NDArray[np.float32]:
        """Return rank, gap, survival, intercept and least as an array."""
        return np.array([self.rank, self.gap, self.survival, self.intercept, self.least], np.float32)


class VerificationLengths(Protocol):
    """Chooses how many drafts of each request a pass verifies (ops/best_slots.py). Arrays are [num_requests] int32."""

    def lengths(
        self, sampling: npt.NDArray[np.void], slots: Int32Array, num_tokens: Int32Array, num_pending: Int32Array
    ) -> Int32Array:
        """Return 0 to num_pending[i] for each request, whose drafts follow its num_tokens[i] committed tokens."""


class Exits(Protocol):
    """Chooses the rows that a running pass goes on with (ops/prune_rows.py)."""

    @property
    def boundaries(self) -> Sequence[int]:
        """Indices into EngineSpec.segments at which rule() is called."""

    def rule(
        self,
        sampling: npt.NDArray[np.void],
        slots: Int32Array,
        num_tokens: Int32Array,
        num_drafts: Int32Array,
        boundary: int,
    ) -> PruneRule:
        """Return the rule for request i's first num_drafts[i] drafts, which follow num_tokens[i] committed tokens."""


class VerifiedDrafts(Protocol):
    """Sums up the outcome of rejection sampling (ops/tested.py)."""

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
    """A policy's decision for one step, and for the num_held steps after it while the same requests decode and no other
    request joins or waits. The scheduler may call plan() again in those, but need not."""

    lengths: Sequence[int]  # pending drafts wanted per decoding request, clamped later to Request.draft_limit
    stop: DraftStop | None = None  # when drafting ends early
    verification: VerificationLengths | None = None  # how many of the pending drafts are verified; None: all
    exits: Exits | None = None  # where rows are dropped inside the pass; None: nowhere
    tested: VerifiedDrafts | None = None  # sums up the verified drafts
    mode: Mode = Mode.SERIAL
    num_held: int = 0
    price: float = 0.0  # expected tokens per ms; 0 if unknown
    # By slot, the number of pending drafts up to which the draft model drafts; other drafters may then go on, at no
    # cost. A slot that is missing has 0; empty: the draft model does not run. None: as lengths.
    model_lengths: Mapping[int, int] | None = None


@value
class PlanStats:
    """Times and tokens of a plan's steps, except the steps right after a change between drafting and not drafting.

    A plan is made anew in a step that runs prompts, so either all of its steps run prompts or none does.
    """

    num_steps: int = 0
    ms: float = 0.0  # of whole steps, the host's time included
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    num_tokens: int = 0  # committed
    num_requests: int = 0  # decoding requests, summed over the steps
    num_rows: int = 0  # target rows without those of prompts
    num_verified: int = 0  # drafts whose rows ran to the end
    num_pruned: int = 0  # rows dropped at segment boundaries
    num_accepted: int = 0
    num_draft_calls: int = 0
    num_draft_rows: int = 0  # of the first steps of draft calls
    num_draft_steps: int = 0  # all steps of draft calls
    num_drafted: int = 0
    num_context_rows: int = 0  # target rows of prompts
    # Draft calls that ran tokens which the draft model had missed, also in steps that are not counted above.
    num_late_calls: int = 0
    num_late_rows: int = 0  # of their first steps
    num_late_steps: int = 0
    num_late_drafted: int = 0
    late_ms: float = 0.0
    num_experts: float = 0.0  # distinct experts of a layer, summed over the passes; 0: not counted
