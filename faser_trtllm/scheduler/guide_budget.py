"""Guided requests take turns where their masks would stretch a step: all other requests wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from faser_trtllm.core.decision import Decision
from faser_trtllm.core.guide import Guide
from faser_trtllm.core.plan import ScheduledRequests
from faser_trtllm.core.request import Request
from faser_trtllm.scheduler.roles import Role, Roles, assign_roles

MAX_GUIDE_MS = 20.0
"""Of a step, for masks as expected; a step goes over it by one request at most."""

UNKNOWN_MS = 5.0
"""Expected of the first mask of a guide that has computed none yet."""

_DECAY = 1 / 8


class _Turn:
    """mask_ms: expected of each mask. num_skipped: steps in turn that the request was left out of."""

    __slots__ = ("mask_ms", "num_skipped")

    def __init__(self) -> None:
        self.mask_ms: float | None = None
        self.num_skipped = 0


class GuideBudget:
    """Chooses the guided requests of each step: those that were left out longest, while the budget lasts, so at least
    one. Tokens do not depend on it: a request that is left out runs a step later.

    What a mask of a request costs is a running mean that rises at once, and for the first one that of its guide.
    """

    def __init__(self) -> None:
        self._first_ms: WeakKeyDictionary[Guide, float] = WeakKeyDictionary()
        self._turns: WeakKeyDictionary[Request, _Turn] = WeakKeyDictionary()
        self._spent_ms = 0.0  # in this step

    def assign_roles(self, running: Sequence[Request], decoding: Sequence[Request], decision: Decision) -> Roles:
        """Begin a step: the roles of requests that decode, and NONE for all that are left out, contexts too.

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
        """Whether a request that joins in this step may run in it, too."""
        return request.params.guide is None or self._takes(request, 1)

    def note(self, rows: ScheduledRequests, costs: Mapping[int, tuple[float, int]]) -> bool:
        """What masks took in a step: slot -> ms and their number. True if it was more than the budget."""
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
