"""Which rows a draft model's first pass has: native against the reference, and by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm import native
from faser_trtllm.core.plan import ScheduledRequest, ScheduledRequests
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.ops.requests.fill_rows import RowFiller
from lab.reference.requests.draft_rows import draft_rows_reference
from lab.reference.requests.fill_rows import fill_rows_reference
from tests.support.sampling_slots import Slots

BOTH = tuple(native.SOURCES)


def scheduled(lives, model_lengths=None):
    """Return requests as `lives` has them: (num_tokens, num_computed, num_draft_computed, num_pending, num_new_tokens,
    num_drafts, drafters) each."""
    items = []
    for slot, (known, computed, draft_computed, pending, num_new, num_drafts, drafters) in enumerate(lives):
        params = SamplingParams(max_tokens=40, drafters=drafters)
        request = Request(str(slot), range(known), params, max_seq_len=64, max_draft_len=6)
        request.slot, request.num_drafts = slot, pending
        request.num_computed_tokens, request.num_draft_computed_tokens = computed, draft_computed
        items.append(ScheduledRequest(request, num_new, num_drafts, num_drafts))
    return ScheduledRequests.of(items, model_lengths)


TABLE = np.zeros((5, 1), np.int32)


def fill(rows, num_pending, max_num_rows, kind):
    """Return the rows, and the batch of them, which is the reference's."""
    slots = Slots(5, 100, 0)
    slots.tokens[:] = np.arange(slots.tokens.size).reshape(slots.tokens.shape) % 100
    found, batch = RowFiller(5, max_num_rows, TABLE).fill_draft(slots.array, rows, num_pending, kind)
    wanted = fill_rows_reference(slots.array, found.slots, found.first, found.end, found.num_logit_rows, TABLE)
    for name in ("slots", "cu_rows", "token_ids", "positions", "logit_rows"):
        assert getattr(batch, name).tolist() == getattr(wanted, name).tolist(), name
    return found


@st.composite
def lives(draw):
    known = draw(st.integers(1, 20))
    computed = known - 1 if draw(st.booleans()) else draw(st.integers(0, known - 1))
    pending = draw(st.integers(0, 3))
    wanted = draw(st.integers(0, 6))
    num_new = draw(st.integers(0, known - computed))
    drafters = draw(st.sampled_from([None, BOTH, ("model",), ("suffix",), ()]))
    return known, computed, draw(st.integers(0, known + pending)), pending, num_new, wanted, drafters


@given(
    lives=st.lists(lives(), max_size=5),
    more=st.integers(0, 2),
    max_num_rows=st.integers(1, 40),
    kind=st.sampled_from([native.DRAFT_MODEL, native.DRAFT_HEAD, native.DRAFT_BLOCK]),
    lengths=st.none() | st.dictionaries(st.integers(0, 4), st.integers(0, 6)),
)
def test_native_is_the_reference(lives, more, max_num_rows, kind, lengths):
    rows = scheduled(lives, lengths)
    arguments = rows, rows.num_pending + more, max_num_rows
    found, wanted = (which(*arguments, kind) for which in (fill, draft_rows_reference))
    for name, column, other in zip(found._fields, found, wanted, strict=True):
        assert column.tolist() == other.tolist(), name


def rows_of(*lives, max_num_rows=40, kind=native.DRAFT_MODEL, lengths=None):
    """Return (slot, first, end, drafts wanted) of each that has rows."""
    rows = scheduled(lives, lengths)
    found = fill(rows, rows.num_pending, max_num_rows, kind)
    assert found.num_logit_rows.tolist() == (found.num_new > 0).astype(int).tolist()
    assert rows.slots[found.requests].tolist() == found.slots.tolist()
    return list(zip(*(c.tolist() for c in (found.slots, found.first, found.end, found.num_new)), strict=True))


DECODES = (10, 9, 9, 0, 1, 3, None)
PROMPT = (10, 2, 1, 0, 5, 0, None)


def test_who_decodes_drafts_and_prompts_are_followed():
    assert rows_of(DECODES, PROMPT) == [(0, 9, 10, 3), (1, 1, 7, 0)]
    pending = (10, 9, 11, 2, 1, 3, None)  # the newest draft has not been run
    assert rows_of(pending) == [(0, 11, 12, 1)]


def test_a_head_comes_after_the_target_and_ends_with_the_committed_tokens():
    assert rows_of(PROMPT, kind=native.DRAFT_HEAD) == [(0, 1, 3, 0)]
    assert rows_of((10, 9, 9, 2, 1, 3, None), kind=native.DRAFT_HEAD) == [(0, 9, 10, 1)]
    assert rows_of((10, 0, 0, 0, 5, 0, None), kind=native.DRAFT_HEAD) == []


def test_a_block_drafter_follows_the_target_and_drafts_where_nothing_is_pending():
    assert rows_of(PROMPT, kind=native.DRAFT_BLOCK) == [(0, 1, 2, 0)]
    assert rows_of((10, 9, 9, 0, 1, 3, None), kind=native.DRAFT_BLOCK) == [(0, 9, 10, 3)]
    assert rows_of((10, 9, 7, 2, 1, 3, None), kind=native.DRAFT_BLOCK) == []
    assert rows_of((10, 9, 2, 0, 1, 3, None), max_num_rows=7, kind=native.DRAFT_BLOCK) == [(0, 2, 9, 0)]
    assert rows_of((1, 0, 0, 0, 1, 3, None), kind=native.DRAFT_BLOCK) == [(0, 0, 1, 3)]


@pytest.mark.parametrize("drafters", [("suffix",), ()])
def test_who_must_not_draft_has_no_rows(drafters):
    assert rows_of((*DECODES[:-1], drafters), (*PROMPT[:-1], drafters)) == []
    assert rows_of((*DECODES[:-1], ("model",))) == [(0, 9, 10, 3)]


def test_lengths_of_the_model_are_a_limit():
    assert rows_of(DECODES, DECODES, lengths={0: 1}) == [(0, 9, 10, 1)]


def test_rows_that_do_not_fit_wait_and_with_them_the_drafts():
    late = (10, 9, 2, 0, 1, 3, None)
    assert rows_of(late, DECODES, max_num_rows=5) == [(0, 2, 7, 0)]
    assert rows_of(late, DECODES, max_num_rows=9) == [(0, 2, 10, 3), (1, 9, 10, 3)]
