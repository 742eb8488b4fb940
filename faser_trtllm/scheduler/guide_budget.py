"""Guided requests take turns if their masks would make a step too long, since all other requests wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from faser_trtllm.core.decision import Decision
from faser_trtllm.core.guide import Guide
from faser_trtllm.core.plan import ScheduledRequests
from faser_trtllm.core.request import Request
from faser_trtllm.scheduler.roles import Role, Roles, assign_roles

MAX_GUIDE_MS = 20.0
"""Time budget for a step's masks, by their expected times; at most one request exceeds it."""

UNKNOWN_MS = 5.0
"""Expected time of the first mask of a guide that has none yet."""

_DECAY = 1 / 8


class _Turn:
    """A guided request's state. mask_ms: expected time per mask, None before the first one. num_skipped: number of
    consecutive latest steps that left the request out."""

    __slots__ = ("mask_ms", "num_skipped")

    def __init__(self) -> None:
        self.mask_ms: float | None = None
        self.num_skipped = 0


class GuideBudget:
    """Chooses the guided requests of each step: those that were left out longest come first, until the budget is spent,
    so at least one runs. Tokens do not depend on the choice: a request that is left out runs a step later.

    The expected time of a request's mask is a running mean that follows an increase at once. Before the request's first
    mask, it is such a mean over the first masks of its guide.
    """

    def __init__(self) -> None:
        self._first_ms: WeakKeyDictionary[Guide, float] = WeakKeyDictionary()
        self._turns: WeakKeyDictionary[Request, _Turn] = WeakKeyDictionary()
        self._spent_ms = 0.0  # in this step

    def assign_roles(self, running: Sequence[Request], decoding: Sequence[Request], decision: Decision) -> Roles:
        """Begin a step. Return the roles of decoding requests, and NONE for each request that is left out, also in its
        context phase.

        running: in order of admission.
        """
        roles = assign_roles(decoding, decision.mode)
        self._spent_ms = 0.0
        guided = [r for r in running if r.params.guide is not None and roles.get(r.slot) is not Role.NONE]
        if not guided:
            return roles
        lengths = {r.slot: length for r, length in zip(decoding, decision.lengths, strict=True)}
        guided.sort(key=lambda request: -self._turn(request).num_skipped)
        left_out = [r for r in guided if not self._takes(r, 1 + max(r.num_drafts, lengths.get(r.slot, 0)))]
        roles.update((request.slot, Role.NONE) for request in left_out)
        return roles

    def admits(self, request: Request) -> bool:
        """Return True if a request that joins in this step may also run in it."""
        return request.params.guide is None or self._takes(request, 1)

    def note(self, rows: ScheduledRequests, costs: Mapping[int, tuple[float, int]]) -> bool:
        """Record the time of a step's masks, by slot (ms, number of masks). Return True if it exceeded the budget."""
        for request in rows.requests:
            guide = request.params.guide
            if guide is None or request.slot not in costs:
                continue
            ms, num_masks = costs[request.slot]
            turn = self._turn(request)
            if turn.mask_ms is None:
                self._first_ms[guide] = _mean(self._first_ms.get(guide, 0.0), ms / num_masks)
            turn.mask_ms = _mean(turn.mask_ms or 0.0, ms / num_masks)
        return sum(ms for ms, _ in costs.values()) > MAX_GUIDE_MS

    def _takes(self, request: Request, num_masks: int) -> bool:
        turn, guide = self._turn(request), request.params.guide
        if self._spent_ms >= MAX_GUIDE_MS or guide is None:
            turn.num_skipped += 1
            return False
        mask_ms = self._first_ms.get(guide, UNKNOWN_MS) if turn.mask_ms is None else turn.mask_ms
        self._spent_ms += num_masks * mask_ms
        turn.num_skipped = 0
        return True

    def _turn(self, request: Request) -> _Turn:
        turn = self._turns.get(request)
        if turn is None:
            turn = self._turns[request] = _Turn()
        return turn


def _mean(before: float, value: float) -> float:
    return value if value > before else before + _DECAY * (value - before)
