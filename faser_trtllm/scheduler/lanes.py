"""Who drafts and who is verified in a step, by mode."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from faser_trtllm.core.decision import Mode
from faser_trtllm.core.request import Request


class Lane(enum.Enum):
    BOTH = "both"  # drafted, then verified with the new drafts
    AHEAD = "ahead"  # verified with what is pending while the draft extends it
    VERIFY = "verify"
    DRAFT = "draft"
    NONE = "none"  # waits for its half's turn


def assign_lanes(decoding: Sequence[Request], mode: Mode) -> dict[int, Lane]:
    """Slot -> lane. In ping_pong a request alternates: drafted in one step, verified in the next.

    Who has pending drafts is verified, the others are drafted. Where all are on one side, half of them goes on, so that
    from the next step on both lanes have work.
    """
    if mode is not Mode.PING_PONG or len(decoding) < 2:
        lane = Lane.AHEAD if mode is Mode.DRAFT_AHEAD else Lane.BOTH
        return {request.slot: lane for request in decoding}
    pending = [r for r in decoding if r.num_drafts or r.was_drafted or not r.draft_limit]
    fresh = [r for r in decoding if not (r.num_drafts or r.was_drafted) and r.draft_limit]
    lanes = {request.slot: Lane.VERIFY for request in pending} | {request.slot: Lane.DRAFT for request in fresh}
    if not pending:
        lanes |= {request.slot: Lane.VERIFY for request in fresh[len(fresh) // 2 :]}
    elif not fresh and all(r.num_drafts for r in pending):
        lanes |= {request.slot: Lane.NONE for request in pending[len(pending) // 2 :]}
    return lanes
