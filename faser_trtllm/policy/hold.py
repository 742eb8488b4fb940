"""How long a plan stands."""

from __future__ import annotations

from collections.abc import Sequence

from faser_trtllm.core.request import Request

HELD_STEPS = 16  # at least: what a plan rests on is learnt no faster
TRIAL_STEPS = 4  # of an arm, where drafting is in charge; the first two after a change are not counted
HELD_MS = 100.0  # and about so long, so that planning takes less than 1 % of short steps' time
MAX_HELD_STEPS = 1024


def mean_context(decoding: Sequence[Request]) -> float:
    return sum(request.num_tokens for request in decoding) / len(decoding)
