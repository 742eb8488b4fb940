"""faser_draft with a stop against single steps and the reference rule, and that stopping only ever shortens."""

from __future__ import annotations

import numpy as np
import pytest

from faser_trtllm import native
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.request import NUM_CANDIDATES, Request
from faser_trtllm.core.sampling_params import NUM_MODES, SamplingParams
from faser_trtllm.engine.base import DraftBatch
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.sampling.table import SamplingTable
from lab.reference.draft_stop import goes_on, pending_margins, pending_sources
from lab.reference.draw import gumbel_lead

VOCAB_SIZE, MAX_DRAFT_LEN, NUM_SLOTS = 100, 6, 5
PARAMS = [{}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.3, "top_k": 20}, {}, {"temperature": 1.0}]
NUM_TOKENS = [11, 5, 9, 20, 6]
NUM_PENDING = [0, 1, 2, 0, 3]  # drafted by an earlier call
CURVES = NUM_MODES, MAX_DRAFT_LEN
NUM_NEW = [6, 5, 3, 0, 2]


class Rig:
    """The same requests each time, in slots in reverse order, with some drafts pending."""

    def __init__(self, harness, certain=0):
        """certain: of each request's pending drafts so many are said to be the text's."""
        self.harness = harness
        keys = iter(range(1, 100))
        self.table = SamplingTable(NUM_SLOTS, VOCAB_SIZE, MAX_DRAFT_LEN, new_key=lambda: next(keys))
        self.slots = list(range(NUM_SLOTS))[::-1]
        self.requests = []
        for slot, params, num_tokens in zip(self.slots, PARAMS, NUM_TOKENS, strict=True):
            prompt = np.random.default_rng(slot).integers(0, VOCAB_SIZE, num_tokens)
            request = Request(
                str(slot),
                prompt,
                SamplingParams(max_tokens=20, **params),
                max_seq_len=64,
                max_draft_len=MAX_DRAFT_LEN,
                keep_candidates=True,
            )
            self.table.bind(slot, request)
            self.requests.append(request)
        assert self.draft([0] * 5, NUM_PENDING) == NUM_PENDING
        for request, pending in zip(self.requests, NUM_PENDING, strict=True):
            first = request.num_tokens
            request.draft_sources[first : first + min(certain, pending)] = native.BY_SUFFIX

    def draft(self, num_drafts, num_new, stop=None):
        rows = [
            (slot, request.tokens, 0, request.num_tokens + drafts)
            for slot, request, drafts in zip(self.slots, self.requests, num_drafts, strict=True)
        ]
        counts = [np.array(values, np.int32) for values in (NUM_TOKENS, num_drafts, num_new)]
        batch = self.harness.batch(rows)
        return self.harness.engine.draft(DraftBatch(batch, self.table.array, *counts, MAX_DRAFT_LEN, stop)).tolist()

    def draft_stepwise(self, stop):
        """One token per call, the rule in Python between the calls."""
        drafts = list(NUM_PENDING)
        drafted = [0] * NUM_SLOTS
        going = [new > 0 for new in NUM_NEW]
        while any(going):
            found = self.draft(drafts, [int(goes) for goes in going])
            for i, new in enumerate(found):
                drafts[i] += new
                drafted[i] += new
            wanting = [i for i in range(NUM_SLOTS) if going[i] and found[i] and drafted[i] < NUM_NEW[i]]
            pending = [(self.table.array[self.slots[i]], self.requests[i].num_tokens, drafts[i]) for i in wanting]
            margins = [pending_margins(*each) for each in pending]
            sources = [pending_sources(*each) for each in pending]
            modes = [self.requests[i].sampling_mode for i in wanting]
            verdict = dict(zip(wanting, goes_on(stop, modes, margins, sources), strict=True))
            going = [verdict.get(i, False) for i in range(NUM_SLOTS)]
        return drafted


def random_stop(seed):
    rng = np.random.default_rng(seed)
    price = rng.choice([0.0, 0.3, 0.8])
    return DraftStop(
        rng.uniform(0, 2, CURVES).astype(np.float32),
        rng.uniform(-1, 1.5, CURVES).astype(np.float32),
        rng.uniform(0.3, 0.7, CURVES).astype(np.float32),
        rng.uniform(0.0, 0.3, CURVES).astype(np.float32),
        rng.uniform(0, rng.choice([0.0, 0.3, 0.6]), MAX_DRAFT_LEN).astype(np.float32),
        (price * np.sqrt(np.arange(NUM_SLOTS + 1))).astype(np.float32),
    )


@pytest.mark.parametrize("certain", [0, 2])
def test_native_stops_where_the_reference_stops(harness, certain):
    lengths = set()
    for seed in range(40):
        one_call, stepwise = Rig(harness, certain), Rig(harness, certain)
        stop = random_stop(seed)
        found = one_call.draft(NUM_PENDING, NUM_NEW, stop)
        assert found == stepwise.draft_stepwise(stop), seed
        lengths.add(tuple(found))
        for a, b in zip(one_call.requests, stepwise.requests, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.draft_margins.tolist() == b.draft_margins.tolist()
            assert a.draft_candidates.tolist() == b.draft_candidates.tolist()
    assert len(lengths) > 8, "the stops must differ in what they do"


def test_stopping_shortens_and_changes_no_draft(harness):
    """The drafts are a prefix of those that would be drafted without a stop."""
    free = Rig(harness)
    assert free.draft(NUM_PENDING, NUM_NEW) == NUM_NEW
    for seed in range(10):
        stopped = Rig(harness)
        found = stopped.draft(NUM_PENDING, NUM_NEW, random_stop(seed))
        for i, (a, b) in enumerate(zip(stopped.requests, free.requests, strict=True)):
            assert (1 if NUM_NEW[i] else 0) <= found[i] <= NUM_NEW[i]
            end = NUM_TOKENS[i] + NUM_PENDING[i] + found[i]
            assert a.tokens[:end].tolist() == b.tokens[:end].tolist()
            assert a.draft_margins[:end].tolist() == b.draft_margins[:end].tolist()
            assert not a.tokens[end:].any()


def flat_stop(**fields):
    """A field is a number, for all of its array, or the array. Given none, everybody drafts on."""
    sizes = {**dict.fromkeys(("slope", "intercept", "prior", "spread"), CURVES), "row_price": MAX_DRAFT_LEN}
    sizes["step_price"] = NUM_SLOTS + 1
    values = dict.fromkeys(sizes, 0) | {"prior": 1} | fields
    return DraftStop(
        *(np.full(sizes[n], v, np.float32) if isinstance(v, int | float) else v for n, v in values.items())
    )


@pytest.mark.parametrize(
    ("fields", "drafted"),
    [
        ({}, NUM_NEW),
        ({"step_price": 100}, [1, 1, 1, 0, 1]),
        # Each draft halves the survival: three halves reach 1/8, pending drafts included.
        ({"row_price": 0.2}, [3, 2, 1, 0, 1]),
        # The same survivals, since a row is run only where its draft turns out to be the target's.
        ({"row_price": 0.2, "prior": 0.5, "spread": 0.5}, [3, 2, 1, 0, 1]),
    ],
)
def test_the_ends_of_the_scale(harness, fields, drafted):
    assert Rig(harness).draft(NUM_PENDING, NUM_NEW, flat_stop(**fields)) == drafted


def test_margins_and_candidates_belong_to_their_drafts(harness):
    rig = Rig(harness)
    rig.draft(NUM_PENDING, NUM_NEW)
    for i, request in enumerate(rig.requests):
        first, end = NUM_TOKENS[i], NUM_TOKENS[i] + NUM_PENDING[i] + NUM_NEW[i]
        logits = harness.run([(rig.slots[i], request.tokens, 0, end)])[0]
        assert not request.draft_margins[:first].any()
        assert not request.draft_margins[end:].any()
        for position in range(first, end):
            top = np.sort(logits[position - 1])[::-1]
            if request.params.seed is None:
                assert request.draft_margins[position] == top[0] - top[1]
            else:  # the lead of the gumbel max
                probs = np.exp((logits[position - 1] - top[0]) / np.float32(request.params.temperature))
                lead = gumbel_lead(probs / probs.sum(), request.params.seed, position)
                assert request.draft_margins[position] == pytest.approx(request.params.temperature * lead, rel=1e-4)
            candidates = request.draft_candidates[position].tolist()
            best = np.argsort(-logits[position - 1], kind="stable")[:NUM_CANDIDATES].tolist()
            drafted = int(request.tokens[position])
            assert candidates == (best if drafted in best else [*best[:-1], drafted])
        assert (request.draft_candidates[end:] == -1).all()


def test_candidates_cost_no_memory_unless_wanted():
    request = Request("r", [1, 2], SamplingParams(), max_seq_len=64, max_draft_len=4)
    assert request.draft_candidates.shape == (0, NUM_CANDIDATES)
    assert request.draft_margins.shape == request.tokens.shape
    table = SamplingTable(1, VOCAB_SIZE, 4)
    table.bind(0, request)
    assert table.array[0]["draft_candidates"] == 0
    assert table.array[0]["draft_margins"] == request.draft_margins.ctypes.data


def test_a_stop_of_the_wrong_size_or_without_margins_is_refused(harness):
    rig = Rig(harness)
    for field, shape, message in (
        ("intercept", (NUM_MODES, 3), r"intercept is float32 \[3, 3\], need contiguous float32 \[3, 6\]"),
        ("step_price", NUM_SLOTS, "step_price"),
        ("slope", (NUM_MODES, MAX_DRAFT_LEN + 1), "different draft lengths"),
    ):
        with pytest.raises(ValueError, match=message):
            rig.draft(NUM_PENDING, NUM_NEW, flat_stop(**{field: np.zeros(shape, np.float32)}))
    rig.table.array["draft_margins"][2] = 0
    with pytest.raises(InvalidArgumentError):
        rig.draft(NUM_PENDING, NUM_NEW, random_stop(0))
    assert rig.draft(NUM_PENDING, NUM_NEW) == NUM_NEW
