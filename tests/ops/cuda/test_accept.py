"""The accept kernels, run on the CPU as they are, against the numpy reference."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.stats import chisquare

from faser_trtllm import native
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.accept import Outcome, RowStatus
from faser_trtllm.ops.cuda.accept import PART_ENTRIES, ROW_REFUSED
from lab.reference.accept import accept_reference
from tests.ops.cuda.accept_batches import FIELDS, MODES, SMALL_PART, SmallBlocks, int32, one_row, rounds, run
from tests.ops.cuda.emulation import emulated
from tests.support.effort import examples, pick
from tests.support.sampling_slots import Slots


@settings(max_examples=examples(120), derandomize=True)
@given(rounds())
def test_the_kernels_are_the_reference(case):
    max_draft_len, vocab_size, requests, ties, dtype, seed = case
    rng = np.random.default_rng(seed)
    num_slots = len(requests) + 2
    order = rng.permutation(num_slots)[: len(requests)].astype(np.int32)
    num_tokens, num_drafts = int32(*(r[1] for r in requests)), int32(*(r[2] for r in requests))
    cu_rows = np.cumsum([0, *(verified + 1 for *_, verified in requests)]).astype(np.int32)
    logits = rng.standard_normal((cu_rows[-1], vocab_size + 3)).astype(np.float32) * 2
    logits = np.round(logits) if ties else logits
    logits[rng.random(logits.shape) < 0.05] = -np.inf
    logits = torch.from_numpy(logits).to(dtype)

    slots = Slots(num_slots, vocab_size, max_draft_len)
    for slot, (fields, known, drafts, _) in zip(order, requests, strict=True):
        tokens = rng.integers(0, vocab_size, known + drafts)
        slots.set(slot, tokens=tokens, prompt_len=max(1, known - 2), **fields)
        q = rng.dirichlet(np.full(vocab_size, 0.5), max(max_draft_len, 1))
        slots.draft_probs[slot] = q
        slots.draft_sources[slot] = rng.integers(0, 2, slots.draft_sources.shape[1])
    batch = (slots.array, order, None, vocab_size, cu_rows, num_tokens, num_drafts, max_draft_len)
    expected = accept_reference(*batch[:2], logits.float().numpy(), *batch[3:])
    for part_entries in (PART_ENTRIES, SMALL_PART):  # a row by one block and, of larger vocabularies, by several
        found = run(SmallBlocks(), *batch[:2], logits, *batch[3:], part_entries=part_entries)
        for name in FIELDS:
            assert getattr(found, name).tolist() == getattr(expected, name).tolist(), (name, part_entries)


def test_the_kernels_are_the_reference_with_a_whole_block():
    # In a process of its own: two builds of one kernel's templates in one process share their static memory.
    emulated("accept")
    script = "from tests.ops.cuda.whole_blocks import compare_whole_blocks; compare_whole_blocks()"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


class TestSupport:
    """Which tokens can be drawn: every token of a row's distribution, and no other, over many seeds."""

    @staticmethod
    def drawn(logits, num_keys=400, mode=native.SEEDED, dtype=torch.float32, **fields):
        vocab_size = len(logits)
        slots = Slots(num_keys, vocab_size, 1)
        for slot in range(num_keys):
            slots.set(slot, tokens=[0], mode=mode, key=slot * 0x9E3779B97F4A7C15 % 2**64, **fields)
        rows = torch.tensor(np.array(logits, np.float32)).to(dtype).repeat(num_keys, 1)
        none, ones = np.zeros(num_keys, np.int32), np.ones(num_keys, np.int32)
        counts = np.arange(num_keys + 1, dtype=np.int32)
        batch = (slots.array, np.arange(num_keys, dtype=np.int32), rows, vocab_size, counts, ones, none, 1)
        found = run(SmallBlocks(), *batch)
        assert (found.outcome == Outcome.BONUS).all()
        return np.bincount(found.token_ids[:, 0], minlength=vocab_size)

    @pytest.mark.parametrize("mode", [native.SEEDED, native.SAMPLED])
    @pytest.mark.parametrize(
        ("fields", "kept"),
        [
            ({"top_k": 1}, [3]),
            ({"top_k": 2}, [3, 5]),  # ties go to the lower id
            ({"top_k": 3}, [3, 5, 6]),
            ({"top_k": 8}, range(8)),
            ({"top_k": 99}, range(8)),
            ({"top_p": 1e-6}, [3]),
            ({"top_p": 0.39}, [3]),  # 1 of 2.5 is 0.4
            ({"top_p": 0.41}, [3, 5]),
            ({"top_p": 0.79}, [3, 5, 6]),
            ({"top_k": 3, "top_p": 0.51}, [3, 5]),  # of what top_k leaves
            ({"min_p": 0.5}, [3, 5, 6]),
            ({"min_p": 0.51}, [3]),
            ({"min_p": 0.2, "top_p": 0.81}, [3, 5, 6]),
        ],
    )
    def test_filters(self, mode, fields, kept):
        weights = np.array([0.1, 0.1, 0.1, 1, 0.1, 0.5, 0.5, 0.1])
        with np.errstate(divide="ignore"):
            logits = np.log2(weights) * np.log(2) + 5
        logits[weights == 0.5] = np.nextafter(np.float32(5 - np.log(2)), np.float32(9))
        assert np.flatnonzero(self.drawn(logits, mode=mode, **fields)).tolist() == list(kept)

    @pytest.mark.parametrize("top", [*pick([], [{"top_k": 250}]), {"top_p": 0.25}])
    def test_a_thousand_ties_go_to_the_lower_ids(self, top):
        """More equal logits than can be ranked pair by pair: the digits of the ids decide."""
        counts = self.drawn(np.zeros(1000), num_keys=1000, dtype=torch.bfloat16, **top)
        assert counts[250:].sum() == 0
        assert counts[249] > 0
        assert np.count_nonzero(counts) > 230

    @pytest.mark.parametrize("temperature", [1e-3, 1.0, 100.0])
    def test_huge_logits(self, temperature):
        counts = self.drawn([3e38, -3e38, 3e38, 0], temperature=temperature)
        assert (counts[[0, 2]] > 150).all()
        assert counts.sum() == counts[[0, 2]].sum()

    def test_impossible_tokens_are_never_drawn(self):
        logits = np.full(200, -np.inf)
        logits[[7, 150]] = 0
        for mode in (native.SEEDED, native.SAMPLED):
            assert np.flatnonzero(self.drawn(logits, mode=mode)).tolist() == [7, 150]

    def test_one_token(self):
        assert self.drawn([-4.0], num_keys=5).tolist() == [5]


class TestRows:
    @pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
    @pytest.mark.parametrize("where", [0, 63, 99])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("edits", [{}, {"presence_penalty": 0.1}, {"bad_words": [[0], [63], [99]]}])
    def test_nan_and_infinity_have_no_distribution(self, bad, where, mode, edits):
        logits = np.linspace(-1, 1, 100)
        logits[where] = bad
        assert one_row(SmallBlocks(), logits, mode=mode, **edits)[2:] == (Outcome.FAILED, RowStatus.NAN)

    @pytest.mark.parametrize("mode", MODES)
    def test_all_banned_is_empty(self, mode):
        banned = {"bad_words": [[0], [1], [2]]}
        assert one_row(SmallBlocks(), [0, 1, 2], mode=mode, **banned)[2:] == (Outcome.FAILED, RowStatus.EMPTY)
        assert one_row(SmallBlocks(), [-np.inf] * 20, mode=mode)[2:] == (Outcome.FAILED, RowStatus.EMPTY)

    def test_the_lowest_id_wins_ties(self):
        assert one_row(SmallBlocks(), [-0.0, 0.0])[0] == 0
        assert one_row(SmallBlocks(), [0] * 70 + [5] * 30)[0] == 70

    def test_a_token_is_biased_as_often_as_it_is_listed(self):
        bias = [(0, 5.0), (0, -5.0), (2, 0.5), (99, 9.0), (-1, 9.0)]
        assert one_row(SmallBlocks(), [0, 1, 0], bias=bias)[0] == 1
        assert one_row(SmallBlocks(), [0, 1, 0], bias=[*bias, (2, 1.0)])[0] == 2
        assert one_row(SmallBlocks(), [-3e38, 0], bias=[(0, 3e38), (0, 3e38)])[0] == 0
        assert one_row(SmallBlocks(), [3e38, 0], bias=[(0, 3e38), (0, -3e38)])[0] == 0

    def test_a_draft_that_is_the_argmax_stands(self):
        assert one_row(SmallBlocks(), [0, 3, 1], drafts=[1])[:3] == (1, 1, Outcome.STILL_PENDING)
        assert one_row(SmallBlocks(), [0, 3, 1], drafts=[2])[:3] == (1, 0, Outcome.RECOVERED)

    def test_equal_distributions_leave_no_residual(self):
        """The test u q < p passes for every u < 1 when p = q; a q that is a rounding above p may fail it."""
        q = np.full(4, np.nextafter(np.float32(0.25), np.float32(1)))
        for key in range(20):
            token, *_, status = one_row(SmallBlocks(), [0] * 4, mode=native.SAMPLED, key=key, drafts=[2], q=q)
            assert status == RowStatus.OK
            assert 0 <= token < 4

    def test_no_residual_draws_from_the_distribution(self):
        """q above p everywhere, as no distribution is: what is drawn after the rejection is the draw from p."""
        n, probs = 800, np.array([0.1, 0.3, 0.6])
        slots = Slots(n, 3, 1)
        slots.draft_probs[:] = 5
        for slot in range(n):
            slots.set(slot, tokens=[0, 0], mode=native.SAMPLED, key=slot)
        logits = np.tile(np.log(probs).astype(np.float32), (n, 1))
        slot_ids, ones = np.arange(n, dtype=np.int32), np.ones(n, np.int32)
        found = run(SmallBlocks(), slots.array, slot_ids, logits, 3, np.arange(n + 1, dtype=np.int32), ones, ones, 1)
        rejected = found.outcome == Outcome.RECOVERED
        assert rejected.sum() > 0.9 * n
        counts = np.bincount(found.token_ids[rejected, 0], minlength=3)
        assert chisquare(counts, counts.sum() * probs).pvalue > 1e-3

    @pytest.mark.parametrize("mode", MODES)
    def test_a_draft_of_the_text_needs_no_probabilities(self, mode):
        """It is accepted where the target's own draw, as if nothing were pending, is that token."""
        logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
        outcomes = set()
        for key in range(20):
            drawn = one_row(SmallBlocks(), logits, mode=mode, key=key)[0]
            fields = {"mode": mode, "key": key, "draft_probs": 0, "certain": True}
            token, accepted, outcome, status = one_row(SmallBlocks(), logits, drafts=[1], **fields)
            expected = Outcome.STILL_PENDING if drawn == 1 else Outcome.RECOVERED
            assert (token, accepted, outcome, status) == (drawn, drawn == 1, expected, RowStatus.OK)
            outcomes.add(outcome)
        assert len(outcomes) == (1 if mode == native.GREEDY else 2)

    def test_a_request_without_sources_has_the_draft_model_s_drafts(self):
        fields = {"mode": native.SAMPLED, "certain": True, "draft_sources": 0, "q": [0.0, 1.0, 0.0]}
        assert one_row(SmallBlocks(), np.log([0.01, 0.98, 0.01]), drafts=[1], key=3, **fields)[:2] == (1, 1)
        assert one_row(SmallBlocks(), [0, 0, 0], drafts=[1], draft_probs=0, **fields)[2:] == (
            Outcome.FAILED,
            ROW_REFUSED,
        )

    def test_rows_behind_a_rejection_are_not_looked_at(self):
        slots = Slots(1, 8, 3)
        slots.set(0, tokens=[0, 1, 2], mode=native.GREEDY)
        logits = np.full((3, 8), np.nan, np.float32)
        logits[0] = np.arange(8)
        found = run(SmallBlocks(), slots.array, int32(0), logits, 8, int32(0, 3), int32(1), int32(2), 3)
        assert (found.outcome[0], found.row_status[0]) == (Outcome.RECOVERED, RowStatus.OK)
        assert found.token_ids[0].tolist() == [7, 0, 0, 0]

    def test_rows_without_a_request_are_padding(self):
        slots = Slots(1, 8, 3)
        slots.set(0, tokens=[0], mode=native.GREEDY)
        logits = np.full((6, 8), np.nan, np.float32)
        logits[0] = np.arange(8)
        found = run(SmallBlocks(), slots.array, int32(0), logits, 8, int32(0, 1), int32(1), int32(0), 3)
        assert (found.outcome[0], found.token_ids[0, 0]) == (Outcome.BONUS, 7)


class TestRefusals:
    """The device cannot raise where ops.accept does: it must refuse without reading memory that is not there."""

    def run(self, *, slot=0, rows=(0, 1), num_tokens=1, num_drafts=0, edits=True, drafts=(), **fields):
        slots = Slots(1, 4, 2)
        slots.set(0, tokens=[0, *drafts], **{name: value for name, value in fields.items() if name != "tokens"})
        if "tokens" in fields:
            slots.array["tokens"] = fields["tokens"]
        logits = np.zeros((3, 4), np.float32)
        batch = (slots.array, int32(slot), logits, 4, int32(*rows), int32(num_tokens), int32(num_drafts), 2)
        found = run(SmallBlocks(), *batch, edits=edits)
        return found.outcome[0], found.row_status[0], found.num_tokens[0]

    def test_the_harness_accepts_what_is_right(self):
        assert self.run() == (Outcome.BONUS, RowStatus.OK, 1)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"slot": -1},
            {"slot": 1},
            {"rows": (0, 2)},  # a row without a draft before it
            {"rows": (1, 0)},
            {"rows": (0, 9), "num_drafts": 2},
            {"rows": (-1, 0), "num_drafts": 2},
            {"num_tokens": 0},
            {"num_drafts": -1},
            {"num_drafts": 3},
            {"num_drafts": 1, "drafts": [4]},
            {"num_drafts": 1, "drafts": [-1], "mode": native.GREEDY},
            {"num_drafts": 1, "draft_probs": 0},
            {"num_drafts": 1, "tokens": 0},
            {"presence_penalty": 1.0, "edits": False},
            {"min_p": 2.0},
            {"min_p": 2.0, "mode": native.SEEDED},
        ],
    )
    def test_wrong_counts_are_refused(self, wrong):
        assert self.run(**wrong) == (Outcome.FAILED, ROW_REFUSED, 0)

    def test_wrong_tensors_are_refused(self):
        slots = Slots(1, 4, 2)
        good = [slots.array, int32(0), np.zeros((1, 4), np.float32), 4, int32(0, 1), int32(1), int32(0), 2]
        wrong = {
            "logits has type fp64": (2, np.zeros((1, 4))),
            "vocab_size is 5; it must be 1 to 4": (3, 5),
            "logits has strides": (2, torch.zeros(4, 3).T),
            r"cu_logit_rows has shape \[3\]; it must be \[2\]": (4, int32(0, 1, 1)),
            "num_tokens has type int64": (5, np.array([1])),
            "max_draft_len is -1": (7, -1),
        }
        for message, (index, value) in wrong.items():
            arguments = [*good[:index], value, *good[index + 1 :]]
            with pytest.raises(InvalidArgumentError, match=message):
                run(None, *arguments)
