"""What a policy sees, what it decides, and what it learns of a step: frozen values."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.request import Request
from faser_trtllm.core.value import value


class Mode(str, enum.Enum):
    """How drafting and verification share the processor in a step."""

    SERIAL = "serial"  # draft, then verify, each on every core
    DRAFT_AHEAD = "draft_ahead"  # verify what is pending while the draft extends it
    PING_PONG = "ping_pong"  # verify one half of the requests while the other half is drafted


@value
class StepView:
    """What a policy sees before it decides. Times of a request: request.arrival_s, request.deadline_s."""

    decoding: Sequence[Request]  # requests that may draft and verify in this step
    num_context_rows: int  # prompt rows that want to run in the same pass, at most
    num_waiting: int  # requests without a slot
    now_s: float
    num_joining: int = 0  # requests whose prompts are being run, or wait and will find a slot: they decode next
    learning_s: float = 0.0  # time that was spent so far on telling the policy outcomes
    num_generated: int = 0  # tokens that decoding requests have got so far, all together, ended requests included


@value
class DraftStop:
    """When drafting ends early, decided inside the one draft call.

    A draft at place j (0 is the first pending one) with margin m (Request.draft_margins), of a request with
    SamplingMode s, is estimated to be accepted with probability sigmoid(slope[s, j] * m + intercept[s, j]); survival is
    the product along the request. After each draft: the next one is expected to be worth its survival x
    prior[s, j + 1] - row_price[j + 1]. A request stops when that is negative; all stop when its sum over those that
    would go on is less than step_price[their number]. Arrays are float32: slope, intercept and prior [NUM_MODES,
    max_draft_len], row_price [max_draft_len], step_price [max_batch_size + 1]; prices in tokens (price x ms of a target
    row, and of a draft step).
    """

    slope: npt.NDArray[np.float32]
    intercept: npt.NDArray[np.float32]
    prior: npt.NDArray[np.float32]
    row_price: npt.NDArray[np.float32]
    step_price: npt.NDArray[np.float32]


@value
class DraftPlan:
    """Pending drafts wanted per decoding request (callers clamp to Request.draft_limit), and how to get there.

    num_held: for so many further steps the plan stands while the same requests decode and nobody joins or waits, so
    that plan() need not be called for them; it may be.
    """

    lengths: Sequence[int]
    stop: DraftStop | None = None
    mode: Mode = Mode.SERIAL
    num_held: int = 0


@value
class ExitView:
    """What early exit saw at a segment boundary, for the rows still running.

    For decoding request i, row j (0 <= j < num_rows[i] - 1) predicts the draft behind it: rank[i][j] is the place of
    that draft among the candidates by the target's intermediate scores (0 is best) and gap[i][j] the best candidate's
    score minus the draft's (0 if it is the best). num_other_rows: rows that cannot be dropped (context chunks).
    """

    boundary: int  # index into EngineSpec.segments
    num_rows: Sequence[int]
    rank: Sequence[npt.NDArray[np.int32]]
    gap: Sequence[npt.NDArray[np.float32]]
    num_other_rows: int


@value
class StepOutcome:
    """What a step found and what it cost; lists in the order of decoding (requests whose rows ran).

    Of num_pending[i] drafts the pass ran rows for num_verified[i] to the end and dropped num_pruned[i] more on the way.
    It tested num_tested[i] drafts and accepted num_accepted[i]: at most one was rejected, what is behind is censored.
    Drafts are still in place: Request.draft_margins[num_tokens : num_tokens + num_tested] are theirs.
    """

    decoding: Sequence[Request]
    num_pending: Sequence[int]
    num_verified: Sequence[int]
    num_pruned: Sequence[int]
    num_tested: Sequence[int]
    num_accepted: Sequence[int]
    num_drafted: int
    num_rows: int  # target rows of the pass, prompts included
    num_context_rows: int
    num_draft_rows: int  # of the draft model's first pass: a row per request that drafts, and what it had missed
    num_waiting: int
    draft_ms: float
    verify_ms: float
    step_ms: float  # of drafting and verifying together: the sum in serial mode, the longer of the two when overlapped
    mode: Mode
    now_s: float  # when it was planned, on a clock that stands still while policies are told outcomes
