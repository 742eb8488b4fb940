"""Drafts from a request's own text: the automaton against a search, its memory, and what it learns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.errors import FaserError, InvalidArgumentError
from faser_trtllm.ops.suffix import SuffixAutomata
from lab.reference.suffix import SuffixReference, longest_match
from tests.support.columns import columns
from tests.support.effort import examples
from tests.support.sampling_slots import Slots

CAPACITY = 160
MAX_DRAFTS = 6


class Text:
    """Slots with room for sources, margins and candidates, and one way of drafting for them."""

    def __init__(self, automata, num_slots=1):
        self.automata = automata
        self.slots = Slots(num_slots, vocab_size=4, max_draft_len=MAX_DRAFTS, capacity=CAPACITY)
        self.sources = np.zeros((num_slots, CAPACITY), np.int8)
        self.margins = np.zeros((num_slots, CAPACITY), np.float32)
        self.candidates = np.zeros((num_slots, CAPACITY, NUM_CANDIDATES), np.int32)

    def begin(self, slot, mode=native.GREEDY, prompt_len=1):
        self.slots.set(slot, mode=mode, prompt_len=prompt_len)
        entry = self.slots.array[slot]
        entry["draft_sources"] = self.sources[slot].ctypes.data
        entry["draft_margins"] = self.margins[slot].ctypes.data
        entry["draft_candidates"] = self.candidates[slot].ctypes.data

    def write(self, slot, first, tokens):
        self.slots.tokens[slot, first : first + len(tokens)] = tokens

    def draft(self, slot, num_tokens, num_drafts=0, wanted=MAX_DRAFTS, num_model=0):
        """Return tokens and margins after the pending drafts."""
        counts = columns([slot], [num_tokens], [num_drafts], [wanted], [num_model])
        (count,) = self.automata.draft(self.slots.array, *counts)
        drafted = slice(num_tokens + num_drafts, num_tokens + num_drafts + count)
        assert (self.sources[slot, drafted] != native.BY_MODEL).all()
        assert (self.candidates[slot, drafted, 0] == self.slots.tokens[slot, drafted]).all()
        assert (self.candidates[slot, drafted, 1:] == -1).all()
        return self.slots.tokens[slot, drafted].tolist(), self.margins[slot, drafted].tolist()


def texts(vocab_size=3):
    """Random tokens, or a piece repeated: what repeats matches at length."""
    tokens = st.integers(0, vocab_size - 1)
    repeated = st.tuples(st.lists(tokens, min_size=1, max_size=7), st.integers(1, 12)).map(lambda x: x[0] * x[1])
    return st.lists(st.one_of(st.lists(tokens, max_size=25), repeated), min_size=1, max_size=3).map(
        lambda pieces: [token for piece in pieces for token in piece][:60] or [0]
    )


@settings(max_examples=examples(300))
@given(data=st.data())
def test_the_automaton_drafts_what_a_search_finds(data):
    """Whole lives: commits of any size, pending drafts that the text does not have, tests of the draft model's, and
    predictions that come true in part."""
    max_tokens = data.draw(st.sampled_from([8, 20, 200]))
    mode = data.draw(st.sampled_from([native.GREEDY, native.SEEDED, native.SAMPLED]))
    with SuffixAutomata(1, max_tokens) as automata:
        pair = [Text(automata), Text(SuffixReference(1, max_tokens))]
        for _ in range(data.draw(st.integers(1, 2))):
            text = data.draw(texts())
            prompt_len = data.draw(st.integers(1, len(text)))
            predicted = data.draw(st.sampled_from([[], text[prompt_len:], text[prompt_len // 2 :], [0, 1, 2, 1]]))
            only = data.draw(st.booleans())
            for one in pair:
                one.automata.reset(0)
                if predicted:
                    one.automata.predict(0, predicted, only_prediction=only)
                one.begin(0, mode, prompt_len)
                one.write(0, 0, text)
            known = prompt_len
            while known <= len(text):
                pending = data.draw(st.lists(st.integers(0, 3), max_size=3))
                tested = data.draw(st.integers(0, 3))
                num_model = data.draw(st.integers(0, 6))
                drafts = []
                for one in pair:
                    one.slots.array["num_tested"][0, native.BY_MODEL] += tested
                    one.slots.array["num_passed"][0, native.BY_MODEL] += tested // 2
                    one.write(0, known, pending)
                    drafts.append(one.draft(0, known, len(pending), num_model=num_model))
                    one.write(0, 0, text)
                assert drafts[0][0] == drafts[1][0]
                assert (pair[0].sources == pair[1].sources).all()
                assert drafts[0][1] == pytest.approx(drafts[1][1], rel=1e-5, abs=1e-5)
                known += data.draw(st.integers(1, 9))


@settings(max_examples=examples(100))
@given(text=texts())
def test_the_longest_match_is_one_that_was_followed(text):
    match = longest_match(text, len(text))
    suffixes = [text[start:] for start in range(len(text))]
    followed = [s for s in suffixes if any(text[i : i + len(s)] == s for i in range(len(text) - len(s)))]
    if match is None:
        assert not followed
        return
    assert match.length == max(map(len, followed))
    assert 1 <= match.count <= match.total
    assert [*text[len(text) - match.length :], match.token] in [
        text[i : i + match.length + 1] for i in range(len(text) - match.length)
    ]


def test_what_followed_most_often_comes_first_and_of_equals_the_latest():
    with SuffixAutomata(1, 100) as automata:
        text = Text(automata)
        for tokens, expected in (([7, 1, 7, 1, 7, 2, 0, 7], 1), ([7, 1, 7, 2, 0, 7], 2), ([7, 2, 7, 1, 0, 7], 1)):
            automata.reset(0)
            text.begin(0)
            text.write(0, 0, tokens)
            assert text.draft(0, len(tokens), wanted=1)[0] == [expected]


def test_who_wants_no_drafts_is_left_alone():
    with SuffixAutomata(2, 100) as automata:
        text = Text(automata, 2)
        for slot in (0, 1):
            text.begin(slot)
            text.write(slot, 0, [1, 2, 3] * 4)
        before = text.slots.tokens.copy()
        found = automata.draft(text.slots.array, *columns([0, 1], [12, 12], [0, 0], [0, 2], [0, 0]))
        assert found.tolist() == [0, 2]
        assert text.slots.tokens[0].tolist() == before[0].tolist()


def test_slots_share_nothing_but_what_was_learnt():
    with SuffixAutomata(2, 100) as automata:
        text = Text(automata, 2)
        for slot, piece in ((0, [1, 2, 3]), (1, [3, 2, 0])):
            text.begin(slot)
            text.write(slot, 0, piece * 4)
        assert text.draft(0, 12, wanted=3)[0] == [1, 2, 3]
        assert text.draft(1, 12, wanted=3)[0] == [3, 2, 0]
        automata.reset(0)
        text.begin(0)
        assert text.draft(0, 1)[0] == []
        assert text.draft(1, 12, wanted=2)[0] == [3, 2]


def test_committed_tokens_teach_whoever_drafted_them():
    """A text that goes on as it did makes its request surer, one that does not makes it doubtful."""
    margins = {}
    for kind in ("repeats", "does not"):
        with SuffixAutomata(1, 200) as automata:
            text = Text(automata)
            text.begin(0, prompt_len=12)
            rng = np.random.default_rng(0)
            tail = [1, 2, 3, 0] * 10 if kind == "repeats" else rng.integers(0, 4, 40).tolist()
            text.write(0, 0, [1, 2, 3, 0] * 3 + tail + [1, 2, 3, 0, 1, 2])
            margins[kind] = text.draft(0, 58, wanted=1)[1][0]
    assert margins["repeats"] > 2.0 > 1.0 > margins["does not"]  # 0.8 at first, log-odds 1.4


def test_the_draft_model_keeps_the_places_where_it_is_surer():
    with SuffixAutomata(1, 200) as automata:
        text = Text(automata)
        text.begin(0)
        text.write(0, 0, [1, 2, 3, 0, 2, 1, 0, 3, 3, 1])  # "1" went on once, so it hardly tells
        drafts, _ = text.draft(0, 10)
        assert len(drafts) >= 1
        assert text.draft(0, 10, num_model=4)[0] == []
        text.slots.array["num_tested"][0, native.BY_MODEL] = 100  # of which none passed
        assert text.draft(0, 10, num_model=4)[0] == drafts


def test_memory_is_bounded_counted_and_given_back():
    max_tokens = 256
    with SuffixAutomata(1, max_tokens) as automata:
        text = Text(automata)
        empty = automata.memory_bytes
        rng = np.random.default_rng(1)
        long = np.zeros(20_000, np.int32)
        held = []
        for kind in range(2):
            long[:] = rng.integers(0, 50, long.size) if kind else 0
            text.begin(0)
            sources = np.zeros(long.size, np.int8)
            fields = {"tokens": long.ctypes.data, "draft_sources": sources.ctypes.data}
            for name, address in (fields | dict.fromkeys(("draft_margins", "draft_candidates"), 0)).items():
                text.slots.array[0][name] = address
            for known in range(1, 8000, 37):
                text.automata.draft(text.slots.array, *columns([0], [known], [0], [1], [0]))
                held.append(automata.memory_bytes)
            automata.reset(0)
            assert automata.memory_bytes == empty
        # At most 2 states and 3 edges per token; vectors and the table of edges hold up to twice, and 4 times, as many.
        assert max(held) - empty <= max_tokens * (2 * 2 * 24 + 3 * 2 * 20 + 3 * 4 * 4 * 2)
        assert max(held) > empty


def predict(automata, prompt, output, prediction, **options):
    """Return the drafts after the output so far, and who they are of."""
    text = Text(automata)
    automata.reset(0)
    automata.predict(0, prediction, **options)
    text.begin(0, prompt_len=len(prompt))
    text.write(0, 0, [*prompt, *output])
    known = len(prompt) + len(output)
    drafts, _ = text.draft(0, known)
    return drafts, text.sources[0, known : known + len(drafts)].tolist()


def test_a_prediction_is_drafted_from_its_beginning_on():
    """Its first token alone tells where the output is, although the prompt has that token too, followed by others."""
    with SuffixAutomata(1, 100) as automata:
        drafts, sources = predict(automata, [3, 0, 3, 0, 3, 0], [3], [3, 1, 2, 1, 1, 2])
        assert drafts == [1, 2, 1, 1, 2]
        assert sources == [native.BY_PREDICTION] * 5


def test_after_a_deviation_the_prediction_is_found_again():
    with SuffixAutomata(1, 100) as automata:
        drafts, sources = predict(automata, [7, 7], [0, 1, 9, 9, 3, 4], [0, 1, 2, 3, 4, 5, 6, 8])
        assert drafts == [5, 6, 8]
        assert set(sources) == {native.BY_PREDICTION}


def test_nothing_is_drafted_beyond_a_prediction_but_the_text_itself():
    with SuffixAutomata(1, 100) as automata:
        assert predict(automata, [7], [1, 2, 3], [1, 2, 3])[0] == []
        prompt = [1, 2, 3, 4, 5]
        assert predict(automata, prompt, [8, 1, 2, 3], [8, 9])[0][:2] == [4, 5]
        assert predict(automata, prompt, [8, 1, 2, 3], [8, 9], only_prediction=True)[0] == []
        assert predict(automata, prompt, [8], [8, 9], only_prediction=True) == ([9], [native.BY_PREDICTION])


@pytest.mark.parametrize(("slot", "tokens"), [(1, [3]), (-1, [3]), (0, []), (0, [3, -1])])
def test_predictions_are_checked(slot, tokens):
    with SuffixAutomata(1, 100) as automata, pytest.raises(FaserError):
        automata.predict(slot, tokens)


@pytest.mark.parametrize("field", [0, 1, 2, 3])
def test_what_would_index_memory_is_checked(field):
    with SuffixAutomata(1, 100) as automata:
        text = Text(automata)
        text.begin(0)
        values = [0, 1, 0, 1, 0]
        values[field] = -1
        with pytest.raises(InvalidArgumentError):
            automata.draft(text.slots.array, *(np.array([value], np.int32) for value in values))
        with pytest.raises(InvalidArgumentError):
            automata.reset(1)


@pytest.mark.parametrize(("max_batch_size", "max_tokens"), [(0, 10), (1, 1)])
def test_sizes_are_checked(max_batch_size, max_tokens):
    with pytest.raises(InvalidArgumentError):
        SuffixAutomata(max_batch_size, max_tokens)
