"""The suffix drafter by hand: requests with guides, whose masks a GPU's draft model does not see."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from faser_trtllm.core.decision import Decision, StepView
from faser_trtllm.core.plan import ScheduledRequest, ScheduledRequests, SchedulerOutput
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.drafters.suffix import SuffixDrafter
from faser_trtllm.ops.arrays import int32_at
from faser_trtllm.sampling.table import SamplingTable
from tests.support.toy_guide import ToyGuide

VOCAB, MAX_DRAFT_LEN = 8, 4
# 1 2 3 4 again and again; 7 leads nowhere.
GUIDE = ToyGuide({0: {1: 1}, 1: {2: 2}, 2: {3: 3}, 3: {4: 0}}, set(), VOCAB)
PROMPT = [7, 2, 7, 2, 1, 2, 3, 4, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("pending", "wanted", "allowed"),
    [((), 4, [1, 2, 3, 4]), ((1,), 3, [2, 3, 4]), ((7,), 3, []), ((1, 7), 2, [])],
)
def test_behind_a_draft_that_the_guide_forbids_there_is_none(pending, wanted, allowed) -> None:
    table = SamplingTable(1, VOCAB, MAX_DRAFT_LEN)
    params = SamplingParams(max_tokens=20, guide=GUIDE)
    request = Request("r", PROMPT, params, max_seq_len=64, max_draft_len=MAX_DRAFT_LEN)
    request.slot, request.num_computed_tokens = 0, request.num_tokens - 1
    table.bind(0, request)
    first = request.num_tokens
    request.tokens[first : first + len(pending)] = pending
    request.num_drafts = len(pending)
    share = ScheduledRequest(request, num_new_tokens=1, num_drafts=len(pending) + wanted, max_verified=0)
    plan = SchedulerOutput(ScheduledRequests.of([share]), StepView([request], 0, 0, 0.0), Decision([wanted]))
    with ExitStack() as stack:
        drafter = SuffixDrafter(table, 64, has_model=False, resources=stack)
        count = drafter.propose(plan, plan.scheduled.num_pending).num_new_drafts[0]
        behind = first + len(pending)
        assert request.tokens[behind : behind + count].tolist() == allowed
    # The forbidden draft is rejected for what the guide allows, and the next position has a mask of its own.
    request.tokens[first : first + 2] = [1, 2]
    table.guided.prepare(0, first, 3)
    masks = int32_at(int(table.array[0]["masks"]), MAX_DRAFT_LEN + 1)
    assert [masks[(first + place) % (MAX_DRAFT_LEN + 1)] for place in range(3)] == [1 << 1, 1 << 2, 1 << 3]
