"""Rows of logits that several blocks look at: the same bits as by one block, where estimates decide and where they must
not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from faser_trtllm import native
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda import accept as op
from faser_trtllm.ops.philox import Stream
from lab.reference.accept import accept_reference
from lab.reference.philox import gumbel_uniforms, uniform
from tests.ops.cuda.accept_batches import FIELDS, MODES, SMALL_PART, SmallBlocks, int32, one_row, run
from tests.ops.cuda.sample_cases import MAX_REQUESTS, SampleCase, assert_same
from tests.support.effort import pick
from tests.support.sampling_slots import Slots

FILTERS = [{}, {"top_k": 1}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.5}, {"min_p": 0.1}]
FILTERS += [{"top_p": 0.9, "min_p": 0.1}, {"top_k": 5000, "top_p": 1e-6}, {"temperature": 1e-40}, {"temperature": 80.0}]
KEYS = range(pick(6, 60))


def batch_of(rng, vocab_size, num_requests):
    """Arguments of run(): every mode and filter, drafts that pass and that fail, ties, rows without numbers."""
    n, max_draft_len = num_requests, 2
    slots = Slots(n, vocab_size, max_draft_len)
    num_drafts, known = rng.integers(0, 3, n).astype(np.int32), rng.integers(1, 9, n).astype(np.int32)
    cu_rows = np.cumsum([0, *(num_drafts + 1)]).astype(np.int32)
    logits = rng.standard_normal((cu_rows[-1], vocab_size)) * rng.choice([0.5, 3, 12], (cu_rows[-1], 1))
    logits[::4] = np.round(logits[::4])
    logits[rng.random(logits.shape) < 0.05] = -np.inf
    for slot in range(n):
        fields = FILTERS[rng.integers(len(FILTERS))] | {"mode": MODES[slot % 3], "key": int(rng.integers(2**63))}
        if slot % 4 == 3:
            fields |= {"presence_penalty": 0.5, "bias": [(vocab_size - 1, 4.0)], "bad_words": [[0]]}
        slots.set(slot, tokens=rng.integers(0, vocab_size, int(known[slot] + num_drafts[slot])), **fields)
        for draft in range(num_drafts[slot]):
            if rng.random() < 0.6:
                slots.tokens[slot, known[slot] + draft] = logits[cu_rows[slot] + draft].argmax()
        slots.draft_probs[slot] = rng.dirichlet(np.full(vocab_size, 0.02), max_draft_len)
    logits[rng.integers(len(logits)), rng.integers(vocab_size)] = np.nan
    rest = (vocab_size, cu_rows, known, num_drafts, max_draft_len)
    return slots, np.arange(n, dtype=np.int32), torch.from_numpy(logits.astype(np.float32)), rest


def assert_equal(found, wanted):
    for name in FIELDS:
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name


@pytest.mark.parametrize("num_blocks", [1, 7])
@pytest.mark.parametrize("seed", range(pick(3, 30)))
def test_any_number_of_parts_and_blocks_gives_the_same(monkeypatch, seed, num_blocks):
    """All launches use one workspace, whatever their number of rows; few blocks work on the parts of later stages."""
    monkeypatch.setattr(op, "MAX_STAGE_BLOCKS", num_blocks)
    rng, module, vocab_size = np.random.default_rng(seed), SmallBlocks(order=seed % 4), 256 * (seed % 3 + 1) + 5
    space = torch.zeros(op.workspace_bytes(40, vocab_size, SMALL_PART), dtype=torch.uint8)
    for num_requests in (9, 2, 12):
        slots, ids, logits, rest = batch_of(rng, vocab_size, num_requests)
        wanted = accept_reference(slots.array.copy(), ids, logits.numpy(), *rest)
        for stages in (op.stages_of(slots.array), op.Stages.ALL):
            found = run(module, slots.array, ids, logits, *rest, part_entries=SMALL_PART, stages=stages, space=space)
            assert_equal(found, wanted)
        assert_equal(run(module, slots.array, ids, logits, *rest), wanted)


@pytest.mark.parametrize("fields", [{"mode": mode} | more for mode in MODES for more in FILTERS[:5]], ids=str)
def test_few_stages_are_enough(fields):
    slots, ids, logits, rest = batch_of(np.random.default_rng(3), 600, 6)
    for slot in range(6):
        slots.set(slot, tokens=slots.tokens[slot].tolist(), key=slot, **fields)
    wanted = accept_reference(slots.array.copy(), ids, logits.numpy(), *rest)
    stages = op.stages_of(slots.array)
    assert (stages is op.Stages.ONE) == (fields["mode"] == native.GREEDY or fields == {"mode": native.SEEDED})
    options = {"part_entries": SMALL_PART, "stages": stages}
    assert_equal(run(SmallBlocks(), slots.array, ids, logits, *rest, **options), wanted)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("step", [-2, -1, 0, 1, 2])
def test_two_who_arrive_almost_at_once_are_told_apart(key, step):
    """Times in different parts are as equal as logits can make them: closer than the rounding of probabilities."""
    first, second, size = 7, 470, 600
    times = -np.log1p(-gumbel_uniforms(key, 1, size))
    logits = np.full(size, -60, np.float32)
    logits[first], logits[second] = 0, np.log(times[second] / times[first])
    for _ in range(abs(step)):
        logits[second] = np.nextafter(logits[second], np.float32(np.sign(step) * 99))
    slots = Slots(1, size, 0)
    slots.set(0, tokens=[0], mode=native.SEEDED, key=key)
    rest = (size, int32(0, 1), int32(1), int32(0), 0)
    wanted = accept_reference(slots.array.copy(), int32(0), logits[None], *rest)
    assert wanted.token_ids[0, 0] in (first, second)
    options = {"part_entries": SMALL_PART, "stages": op.Stages.ONE}
    assert_equal(run(SmallBlocks(), slots.array, int32(0), logits[None], *rest, **options), wanted)


@pytest.mark.parametrize(("key", "token", "alone"), [(8601, 134, False), (3022, 30, True)])
def test_whose_noise_has_no_estimate_can_win(key, token, alone):
    """The leading bits of its number are 469, or 417 from the end: where all are alike, and where nobody else runs."""
    logits = np.full(600, -np.inf if alone else 1.0, np.float32)
    logits[token] = 1.0
    high = np.floor(gumbel_uniforms(key, 1, 600)[token] * 2**32)
    assert min(high, 2**32 - high) < 512
    options = {"part_entries": SMALL_PART, "stages": op.Stages.ONE}
    found = one_row(SmallBlocks(), logits, mode=native.SEEDED, key=key, options=options)
    assert found[0] == token


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("off", [-1e-3, -1e-5, -1e-7, 0.0, 1e-7, 1e-5, 1e-3])
def test_a_draft_on_the_edge_of_its_test(key, off):
    """u q is as close to p as the error of estimates, on either side."""
    rng, size, draft = np.random.default_rng(key), 600, 333
    logits = rng.standard_normal(size).astype(np.float32) * 3
    weights = np.exp(logits.astype(np.float64) - logits.max())
    q = np.full(size, 1e-4, np.float32)
    q[draft] = weights[draft] / weights.sum() / uniform(key, 1, Stream.TEST) * (1 + off)
    slots = Slots(1, size, 1)
    slots.set(0, tokens=[0, draft], mode=native.SAMPLED, key=key)
    slots.draft_probs[0] = q
    rest = (size, int32(0, 1), int32(1), int32(1), 1)
    wanted = accept_reference(slots.array.copy(), int32(0), logits[None], *rest)
    assert wanted.num_accepted[0] == (off < 0) or abs(off) < 1e-6
    assert_equal(run(SmallBlocks(), slots.array, int32(0), logits[None], *rest, part_entries=SMALL_PART), wanted)


def test_a_draft_of_no_weight_fails_even_where_its_q_is_nothing():
    """Estimates have no bound for weights so small that they count as 0."""
    logits = np.zeros(600, np.float32)
    logits[5] = -73
    launcher, sampled = SmallBlocks(), {"mode": native.SAMPLED, "q": np.zeros(600)}
    batch = {"part_entries": SMALL_PART}
    token, accepted, *_ = one_row(launcher, logits, drafts=[5], options=batch, **sampled)
    assert (token != 5, accepted) == (True, 0)
    logits[5] = -71
    assert one_row(launcher, logits, drafts=[5], options=batch, **sampled)[:2] == (5, 1)


@pytest.mark.parametrize("seed", range(pick(4, 40)))
def test_draft_tokens_are_the_reference(seed):
    rng = np.random.default_rng(seed)
    fields = [
        FILTERS[rng.integers(len(FILTERS))] | {"mode": MODES[i % 3], "key": int(rng.integers(2**63))}
        for i in range(MAX_REQUESTS)
    ]
    fields[4] |= {"presence_penalty": 0.5, "bad_words": [[0]]}
    vocab_size = 256 * (seed % 3 + 1) + 5
    found, wanted = (SampleCase(fields, vocab_size, 3, seed, part_entries=SMALL_PART) for _ in range(2))
    assert_same(found.run(SmallBlocks(order=seed % 4, stem="sample")), wanted.run(None))


def test_the_workspace_must_be_there():
    slots, ids, logits, rest = batch_of(np.random.default_rng(1), 600, 2)
    for space, size in ((None, 0), (torch.zeros(100, dtype=torch.uint8), 100)):
        with pytest.raises(InvalidArgumentError, match=f"workspace has {size} bytes, .* rows of 600 tokens need"):
            run(None, slots.array, ids, logits, *rest, part_entries=SMALL_PART, space=space)
