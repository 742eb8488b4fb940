"""Packed sampling entries against their reference, bit for bit, and what may not be packed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm import native
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.arrays import SAMPLING_DTYPE, int8_at, int32_at
from faser_trtllm.ops.transfer.pack_sampling import ENTRY_INTS, DraftProbsAddress, SamplingPacker
from lab.reference.transfer.pack_sampling import pack_sampling_reference
from tests.support.sampling_slots import Slots

NUM_SLOTS, VOCAB_SIZE, MAX_DRAFT_LEN, CAPACITY = 4, 70, 5, 24
BASE = 1 << 40
token_ids = st.integers(0, VOCAB_SIZE - 1)
fields = st.fixed_dictionaries(
    {"mode": st.sampled_from((native.GREEDY, native.SEEDED, native.SAMPLED)), "prompt_len": st.integers(1, 9)},
    optional={
        "repetition_penalty": st.just(1.25),
        "presence_penalty": st.just(-0.5),
        "frequency_penalty": st.just(0.5),
        "min_tokens": st.integers(0, 6),
        "end_ids": st.lists(token_ids, max_size=3),
        "bias": st.lists(st.tuples(token_ids, st.floats(-2, 2, width=32)), max_size=3),
        "bad_words": st.lists(st.lists(token_ids, min_size=1, max_size=3), max_size=3),
        "masks": st.integers(1, 7),
        "draft_sources": st.just(0),
    },
)


def filled(parameters, seed=0) -> Slots:
    random = np.random.default_rng(seed)
    slots = Slots(NUM_SLOTS, VOCAB_SIZE, MAX_DRAFT_LEN, CAPACITY)
    slots.tokens[:] = random.integers(0, VOCAB_SIZE, slots.tokens.shape)
    slots.draft_sources[:] = random.integers(0, 3, slots.draft_sources.shape) == 0
    for slot, given_ in enumerate(parameters):
        own = dict(given_)
        if "masks" in own:
            own["masks"] = random.random((own["masks"], VOCAB_SIZE)) < 0.5
        slots.set(slot, **own)
    return slots


@st.composite
def batches(draw):
    order = draw(st.permutations(range(NUM_SLOTS)))[: draw(st.integers(0, NUM_SLOTS))]
    known = [draw(st.integers(1, 12)) for _ in order]
    num_branches = draw(st.integers(0, len(order)))
    pending = [0 if i >= len(order) - num_branches else draw(st.integers(0, MAX_DRAFT_LEN)) for i in range(len(order))]
    tested = draw(st.booleans())
    rows = [draw(st.integers(0, 1 + count)) for count in pending] if tested else None
    probs = draw(st.sampled_from((None, DraftProbsAddress(1 << 41, 4096))))
    columns = [np.array(column, np.int32) for column in (order, known, pending)]
    options = {
        "num_rows": None if rows is None else np.array(rows, np.int32),
        "branch_tokens": [draw(token_ids) for _ in range(num_branches)],
        "draft_probs": probs,
    }
    return columns, options


def spoilt(size: int) -> np.ndarray:
    return np.full(size, -7, np.int32)


@given(parameters=st.lists(fields, min_size=NUM_SLOTS, max_size=NUM_SLOTS), batch=batches(), seed=st.integers(0, 9))
def test_a_block_is_the_references(parameters, batch, seed) -> None:
    columns, options = batch
    slots, packer = filled(parameters, seed), SamplingPacker(VOCAB_SIZE)
    wanted, is_edited = pack_sampling_reference(slots.array, *columns, BASE, VOCAB_SIZE, **options)
    out = spoilt(wanted.size + 8)
    assert packer.pack(slots.array, *columns, out, BASE, **options) == (wanted.size, is_edited)
    assert out[: wanted.size].tolist() == wanted.tolist()
    assert (out[wanted.size :] == -7).all(), "nothing is written behind the block"
    for capacity in {0, wanted.size // 2, max(wanted.size - 1, 0)}:
        short = spoilt(wanted.size + 8)
        size, _ = packer.pack(slots.array, *columns, short[:capacity], BASE, **options)
        assert (size, (short[capacity:] == -7).all()) == (wanted.size, True), "only counted where there is no room"


def test_what_kernels_read_is_there() -> None:
    """The test follows the addresses, with the block at its own address."""
    slots = filled(
        [
            {"mode": native.SAMPLED, "prompt_len": 2, "bad_words": [(1, 2), (3,)], "end_ids": [9], "min_tokens": 8},
            {"mode": native.GREEDY, "prompt_len": 2, "masks": 3},
        ]
    )
    slots.draft_sources[1, 6:9] = 0, 1, 1
    columns = [np.array(column, np.int32) for column in ((0, 1), (5, 6), (2, 3))]
    out = np.zeros(1000, np.int32)
    packer, base = SamplingPacker(VOCAB_SIZE), native.address_of_buffer(out)
    size, is_edited = packer.pack(slots.array, *columns, out, base, num_rows=np.array([3, 4], np.int32))
    assert (size < out.size, is_edited) == (True, True)
    first, second = out[: 2 * ENTRY_INTS].view(SAMPLING_DTYPE)
    assert int32_at(int(first["tokens"]), 7).tolist() == slots.tokens[0, :7].tolist()
    assert int32_at(int(first["cu_bad_words"]), 3).tolist() == [0, 2, 3]
    assert int32_at(int(first["bad_words"]), 3).tolist() == [1, 2, 3]
    assert int32_at(int(first["end_ids"]), 1).tolist() == [9]
    assert int32_at(int(second["tokens"]) + 4 * 6, 3).tolist() == slots.tokens[1, 6:9].tolist()
    assert int8_at(int(second["draft_sources"]) + 6, 3).tolist() == [0, 1, 1]
    words = -(-VOCAB_SIZE // 32)
    kept = int32_at(int(slots.array[1]["masks"]), 3 * words).reshape(3, words)
    sent = int32_at(int(second["masks"]), 4 * words).reshape(4, words)
    assert second["num_mask_rows"] == 4
    for position in range(6, 10):
        assert sent[position % 4].tolist() == kept[position % 3].tolist()


def test_requests_without_edits_take_their_entries_alone() -> None:
    slots = filled([{"mode": native.GREEDY, "end_ids": [1, 2], "min_tokens": 3, "prompt_len": 2}] * NUM_SLOTS)
    columns = [np.array(column, np.int32) for column in ((0, 2), (5, 9), (0, 0))]
    out = np.zeros(2 * ENTRY_INTS, np.int32)
    assert SamplingPacker(VOCAB_SIZE).pack(slots.array, *columns, out, BASE) == (out.size, False)
    assert out.view(SAMPLING_DTYPE)["num_end_ids"].tolist() == [0, 0], "three tokens are there already"


@pytest.mark.parametrize(
    "broken",
    [{"tokens": 0}, {"num_tokens": 0}, {"num_drafts": -1}, {"num_mask_rows": 0}, {"num_rows": -1}],
    ids=lambda broken: next(iter(broken)),
)
def test_what_cannot_be_is_refused(broken: dict[str, int]) -> None:
    slots = filled([{"mode": native.GREEDY, "masks": 3}])
    given_ = {"num_tokens": 5, "num_drafts": 2, "num_rows": 3} | broken
    for name in ("tokens", "num_mask_rows"):
        if name in broken:
            slots.array[0][name] = broken[name]
    counts = SimpleNamespace(**{name: np.array([value], np.int32) for name, value in given_.items()})
    with pytest.raises(InvalidArgumentError, match="packing the sampling parameters of 1 requests failed"):
        SamplingPacker(VOCAB_SIZE).pack(
            slots.array,
            np.zeros(1, np.int32),
            counts.num_tokens,
            counts.num_drafts,
            np.zeros(500, np.int32),
            BASE,
            num_rows=counts.num_rows,
        )
