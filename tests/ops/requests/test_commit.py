"""The native commit against its reference, and the rules that both keep."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm import native
from faser_trtllm.core.plan import DraftResult, ScheduledRequests, VerifyResult
from faser_trtllm.core.request import Request, counts_of
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.requests.commit import (
    BLOCK_FULL,
    BLOCK_SPARE,
    GOES_ON,
    LENGTH,
    NUM_BOUNDS,
    STOP,
    Committed,
    Committer,
)
from faser_trtllm.ops.requests.table import RequestTable
from lab.reference.requests.commit import commit_reference

NUM_SLOTS, WIDTH, PROMPT_LEN, MAX_TOKENS = 5, 4, 6, 9


def running(draws, prediction=()):
    """A table with a request per (num_output, not computed, num_drafts, end_ids), in slots from the last down."""
    table, requests = RequestTable(NUM_SLOTS), []
    for number, (num_output, behind, num_drafts, end_ids) in enumerate(draws):
        params = SamplingParams(max_tokens=MAX_TOKENS, end_ids=end_ids, prediction=prediction)
        request = Request(str(number), range(PROMPT_LEN), params, max_seq_len=64, max_draft_len=WIDTH - 1)
        request.num_tokens = PROMPT_LEN + num_output
        request.num_computed_tokens = request.num_tokens - behind
        request.num_drafts = num_drafts
        request.draft_sources[:] = np.random.default_rng(number).integers(0, 3, request.draft_sources.size)
        table.enter(NUM_SLOTS - 1 - number, request)
        requests.append(request)
    return table, requests


def state(requests):
    return [(r.counts.tolist(), r.tokens.tolist(), r.stats.first_token_s, r.stats.last_token_s) for r in requests]


@st.composite
def steps(draw):
    """Lives of requests, and of the first of them what the pass found: ids, num_new, accepted and outcome."""
    lives, shares, found = [], [], []
    num_requests = draw(st.integers(0, NUM_SLOTS))
    num_sampled = draw(st.integers(0, num_requests))
    for number in range(num_requests):
        end_ids = tuple(draw(st.lists(st.integers(0, 5), max_size=2)))
        behind, pending = draw(st.integers(1, 4)), draw(st.integers(0, WIDTH - 1))
        lives.append((draw(st.integers(0, MAX_TOKENS - 1)), behind, pending, end_ids))
        num_drafted = draw(st.integers(0, WIDTH - 1 - pending))
        num_rows = behind if number < num_sampled else draw(st.integers(0, behind - 1))
        shares.append((num_rows, num_drafted, draw(st.integers(0, PROMPT_LEN + MAX_TOKENS)), draw(st.integers(0, 2))))
        if number < num_sampled:
            accepted = draw(st.integers(0, pending + num_drafted))
            outcome = draw(st.integers(0, 3))
            num_drawn = draw(st.integers(0, min(2, WIDTH - accepted)))  # two: the second follows a branch
            num_new = accepted + (0 if outcome == native.STILL_PENDING else num_drawn)
            ids = draw(st.lists(st.integers(0, 9), min_size=WIDTH, max_size=WIDTH))
            found.append((ids, num_new, accepted, outcome))
    return lives, shares, found, draw(st.booleans())


def step_of(requests, shares, found, has_pruned=False):
    """shares: rows, drafts, the draft model's tokens and rows dropped, by request."""
    num_rows, num_drafted, num_draft_computed, num_pruned = np.array(shares, np.int32).reshape(-1, 4).T.copy()
    ids = np.array([one[0] for one in found], np.int32).reshape(-1, WIDTH)
    sampled = np.array([one[1:] for one in found], np.int32).reshape(-1, 3).T.copy()
    zeros = np.zeros(len(requests), np.int32)
    slots = np.array([request.slot for request in requests], np.int32)
    parts = (0, len(found), len(requests))
    return (
        ScheduledRequests(requests, slots, counts_of(requests), num_rows, zeros, zeros, parts),
        DraftResult(num_drafted, num_draft_computed),
        VerifyResult(ids, *sampled, zeros, num_pruned if has_pruned else None),
    )


@given(step=steps(), prediction=st.sampled_from([(), (1, 2)]))
def test_a_commit_is_the_references(step, prediction):
    lives, *drawn = step
    table, requests = running(lives, prediction)
    other, others = running(lives, prediction)
    bounds = np.random.default_rng(len(lives)).integers(0, 20, (NUM_SLOTS, NUM_BOUNDS)).astype(np.int32)
    found = Committer(table, bounds).commit(*step_of(requests, *drawn), 5.0)
    assert found == commit_reference(other, bounds, *step_of(others, *drawn), 5.0)
    assert state(requests) == state(others)


NEVER = np.tile(np.array([99, 99, -1], np.int32), (NUM_SLOTS, 1))


def split(row):
    """Split (num_rows, num_drafted, num_draft_computed, ids, num_new, accepted, outcome) into arguments of step_of."""
    return [(*row[:3], 0)], [row[3:]]


def commit(life, row):
    table, (request,) = running([life])
    return request, Committer(table, NEVER).commit(*step_of([request], *split(row)), 5.0)


def test_accepted_drafts_and_the_drawn_token_are_committed():
    request, found = commit((2, 1, 2, ()), (1, 1, 11, [7, 8, 9, 0], 3, 2, native.BONUS))
    assert found == Committed((7, 8, 9), [3], [GOES_ON], [0])
    assert request.tokens[:11].tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 7, 8, 9]
    assert (request.num_tokens, request.num_computed_tokens, request.num_drafts) == (11, 10, 0)
    assert request.num_draft_computed_tokens == 10, "the draft model has not seen the drawn token"
    stats = request.stats
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_steps) == (1, 2, 1)
    assert (stats.first_token_s, stats.last_token_s) == (5.0, 5.0)


@pytest.mark.parametrize(
    ("sources", "row", "counted"),
    [
        ([2, 2, 0], ([7, 8, 9, 0], 3, 2, native.BONUS), (2, 0)),
        ([2, 0, 2], ([7, 8, 9, 0], 2, 1, native.RECOVERED), (1, 1)),  # what follows the rejected draft is dropped
        ([2, 2, 2], ([7, 8, 9, 0], 1, 1, native.STILL_PENDING), (1, 0)),
        ([2, 2, 2], ([7, 5, 9, 0], 3, 2, native.RECOVERED), (1, 0)),  # 5 is an end id: nothing after it was tested
        ([1, 0, 1], ([7, 8, 9, 0], 2, 1, native.RECOVERED), (0, 0)),
    ],
)
def test_drafts_of_a_prediction_are_counted_by_whether_they_passed(sources, row, counted):
    life = (2, 1, 3, (5,))
    table, (request,) = running([life], prediction=[1])
    request.draft_sources[request.num_tokens :][:3] = sources
    Committer(table, NEVER).commit(*step_of([request], *split((1, 0, 11, *row))), 5.0)
    assert (request.stats.num_predicted, request.stats.num_mispredicted) == counted


def test_the_draft_model_has_not_seen_what_was_drawn_in_the_place_of_a_draft():
    """The first of two drawn tokens was a branch: the draft model ran the draft that it replaced, and the next."""
    request, _ = commit((2, 1, 3, ()), (1, 0, 11, [7, 8, 9, 0], 3, 1, native.BONUS))
    assert (request.num_tokens, request.num_computed_tokens, request.num_draft_computed_tokens) == (11, 10, 9)


def test_the_time_of_the_first_token_stays():
    table, (request,) = running([(0, 1, 0, ())])
    committer, row = Committer(table, NEVER), (1, 0, 0, [7] * WIDTH, 1, 0, native.BONUS)
    for now_s in (2.0, 3.0):
        committer.commit(*step_of([request], *split(row)), now_s)
    assert (request.stats.first_token_s, request.stats.last_token_s) == (2.0, 3.0)


def test_untested_drafts_stay():
    request, found = commit((2, 1, 3, ()), (1, 0, 10, [7, 8, 0, 0], 2, 2, native.STILL_PENDING))
    assert (found.num_output, request.num_tokens, request.num_drafts) == ([2], 10, 1)
    assert request.num_draft_computed_tokens == 10


def test_a_chunk_of_a_prompt_commits_nothing():
    table, (request,) = running([(0, 6, 0, ())])
    found = Committer(table, NEVER).commit(*step_of([request], [(4, 0, 4, 0)], []), 5.0)
    assert (found, request.num_tokens, request.num_computed_tokens) == (Committed((), [0], [GOES_ON], [0]), 6, 4)
    assert (request.num_draft_computed_tokens, request.stats.num_steps) == (4, 0)


def test_an_end_id_and_what_is_behind_it_are_not_output():
    request, found = commit((2, 1, 2, (5, 8)), (1, 0, 9, [7, 8, 9, 0], 3, 2, native.BONUS))
    assert (found, request.num_tokens, request.num_computed_tokens) == (Committed((7,), [1], [STOP], [0]), 9, 9)


@pytest.mark.parametrize(
    ("row", "counted"),
    [
        (([7, 8, 9, 0], 3, 3, native.BONUS), (2, 1)),  # 8 is the end id: 9 is not counted
        (([8, 7, 9, 0], 3, 3, native.STILL_PENDING), (1, 0)),
        (([7, 9, 8, 0], 3, 2, native.RECOVERED), (3, 2)),  # it was drawn, so all drafts were tested or dropped
        (([7, 9, 6, 8], 4, 3, native.BONUS), (3, 3)),
    ],
)
def test_drafts_are_counted_up_to_the_end_id_and_accepted_before_it(row, counted):
    request, _ = commit((2, 1, 0, (8,)), (1, 3, 9, *row))
    assert (request.stats.num_draft_tokens, request.stats.num_accepted_tokens) == counted


def test_the_limit_ends_a_request():
    request, found = commit((MAX_TOKENS - 1, 1, 0, (1,)), (1, 0, 9, [7, 0, 0, 0], 1, 0, native.BONUS))
    assert (found, request.num_output_tokens) == (Committed((7,), [1], [LENGTH], [0]), MAX_TOKENS)


@pytest.mark.parametrize(
    ("bounds", "due"),
    [
        ((11, 99, -1), 0),
        ((10, 99, -1), BLOCK_FULL),
        ((99, 10, -1), BLOCK_FULL),
        ((99, 99, 11), BLOCK_SPARE),
        ((99, 99, 10), 0),
        ((0, 0, 30), BLOCK_FULL | BLOCK_SPARE),
    ],
)
def test_blocks_that_are_full_or_to_spare_are_named(bounds, due):
    """There are 11 tokens then, and 10 with KV of either model."""
    table, (request,) = running([(2, 1, 2, ())])
    committer = Committer(table, np.tile(np.array(bounds, np.int32), (NUM_SLOTS, 1)))
    step = step_of([request], *split((1, 1, 11, [7, 8, 9, 0], 3, 2, native.BONUS)))
    assert committer.commit(*step, 5.0).due == [due]


@pytest.mark.parametrize(("num_new", "accepted"), [(WIDTH + 1, 0), (-1, 0), (1, 2), (1, -1)])
def test_tokens_that_cannot_be_are_refused_and_change_nothing(num_new, accepted):
    table, requests = running([(2, 1, 0, ()), (2, 1, 0, ())])
    before = state(requests)
    found = [([7] * WIDTH, 1, 0, native.BONUS), ([7] * WIDTH, num_new, accepted, native.BONUS)]
    with pytest.raises(InvalidArgumentError, match="committing the tokens of 2 requests"):
        Committer(table, NEVER).commit(*step_of(requests, [(1, 0, 8, 0)] * 2, found), 5.0)
    assert state(requests) == before


def test_a_slot_without_a_request_is_refused():
    table, requests = running([(2, 1, 0, ())])
    step = step_of(requests, *split((1, 0, 8, [7] * WIDTH, 1, 0, native.BONUS)))
    table.leave(requests[0])
    with pytest.raises(InvalidArgumentError, match="committing the tokens of 1 requests"):
        Committer(table, NEVER).commit(*step, 5.0)


def test_a_request_that_leaves_keeps_its_counts():
    table, (request,) = running([(2, 1, 2, ())])
    slot, before = request.slot, state([request])
    table.leave(request)
    table.counts[slot] = 0  # of whoever is next
    assert (state([request]), request.slot) == (before, -1)
    assert request.stats.counts is request.counts
