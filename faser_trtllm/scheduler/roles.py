"""Assigns requests to drafting and verification in a step, by mode."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from faser_trtllm.core.decision import Mode
from faser_trtllm.core.request import Request


class Role(enum.Enum):
    BOTH = "both"  # draft first, then verify with the new drafts
    AHEAD = "ahead"  # verify pending drafts while the draft model extends them
    VERIFY = "verify"
    DRAFT = "draft"
    NONE = "none"  # wait for the turn of its half


Roles = dict[int, Role]
"""Roles by slot."""


def assign_roles(decoding: Sequence[Request], mode: Mode) -> Roles:
    """Return roles by slot. In ping_pong a request alternates: drafted in one step, verified in the next.

    Requests with pending drafts are verified, the others are drafted. If all are on one side, only half of them
    continue, so that both sides have work from the next step on.
    """
    if mode is not Mode.PING_PONG or len(decoding) < 2:
        role = Role.AHEAD if mode is Mode.DRAFT_AHEAD else Role.BOTH
        return {request.slot: role for request in decoding}
    pending = [r for r in decoding if r.num_drafts or r.was_drafted or not r.draft_limit]
    fresh = [r for r in decoding if not (r.num_drafts or r.was_drafted) and r.draft_limit]
    roles = {request.slot: Role.VERIFY for request in pending} | {request.slot: Role.DRAFT for request in fresh}
    if not pending:
        roles |= {request.slot: Role.VERIFY for request in fresh[len(fresh) // 2 :]}
    elif not fresh and all(r.num_drafts for r in pending):
        roles |= {request.slot: Role.NONE for request in pending[len(pending) // 2 :]}
    return roles
