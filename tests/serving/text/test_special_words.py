"""Stop words, bad words and biased words that are special tokens, or hold some."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.text.service import TextGenerator
from tests.support.checkpoints import BEGIN_OF_TEXT
from tests.support.effort import examples
from tests.support.scripted_text import ScriptExecutor, cut, joined, run
from tests.support.sentencepiece import sentencepiece_backend

TURN, TOOL = "<|turn|>", "[TOOL]"


@pytest.fixture(scope="module")
def marked(tokenizer):
    """The tokenizer with two special tokens more."""
    backend = Backend.from_str(tokenizer.definition)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (TURN, TOOL)])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN_OF_TEXT} $A", special_tokens=[(BEGIN_OF_TEXT, 1)]
    )
    return Tokenizer(backend.to_str())


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=True)


@pytest.mark.parametrize(
    ("written", "words", "text"),
    [
        (f"Hello{TURN} world", (TURN,), "Hello"),
        (f"Hello{TURN} world", ("x", f"{TURN} wor"), "Hello"),
        (f"Hello{TURN} world", (f"llo{TURN}",), "He"),
        (f"Hello{TURN}{TOOL} world", (f"o{TURN}{TOOL} w",), "Hell"),
        (f"Hello{TURN} world", (f"{TURN}x", "wor"), "Hello "),
        (f"Hello{TURN} world", ("o w",), "Hell"),  # of the text that is returned
        (f"a{TURN}b{TURN}c", (f"b{TURN}c", f"{TURN}c"), "a"),  # of words that end together the longest
        (f"xa{TURN}b", ("ab", f"{TURN}x"), "x"),
        (f"xa{TURN}b", ("ab", f"{TURN}b"), "x"),
        (f"z{TURN}a{TURN}", (f"|>a{TURN}",), "z"),
        (f"Hello{TURN} world", (f"|> world{TOOL}", f"{TURN}{TOOL}"), "Hello world"),
        (f"Hello{TURN} world", (TURN[1:],), "Hello world"),  # a part of a name that is not shown
    ],
)
def test_a_stop_word_that_holds_a_special_token_ends_the_text_there(marked, written, words, text):
    ids = ids_of(marked, written)
    for chunks in ([ids], [[token] for token in ids]):
        outputs, stopped = run(marked, chunks, stop_words=words)
        assert (joined(outputs)[0], stopped) == (text, text != "Hello world")
        for token in joined(outputs)[1]:
            assert token in ids


def test_special_tokens_before_the_word_are_in_the_output_those_in_it_are_not(marked):
    ids = ids_of(marked, f"x{TURN}a{TOOL}b")
    for chunks in ([ids], [[token] for token in ids]):
        assert joined(run(marked, chunks, stop_words=("ab", f"{TOOL}c"))[0]) == ("x", ids[:2], "stop")


def test_the_token_itself_is_no_part_of_the_output_and_letters_end_it_too(marked):
    ids = ids_of(marked, f"ab{TURN}c")
    assert joined(run(marked, [ids], stop_words=(TURN,))[0]) == ("ab", ids[:-2], "stop")
    letters = marked.encode(f"ab{TURN}c", add_special_tokens=False)
    assert joined(run(marked, [letters], stop_words=(TURN,))[0])[0] == "ab"
    assert joined(run(marked, [ids], stop_words=(TURN,), skip_special_tokens=False)[0])[0] == "ab"


@pytest.mark.parametrize(("word", "text"), [("🙂", "ab"), ("b🙂", "a"), ("🙂c", "ab")])
def test_a_token_that_begins_the_word_s_first_character_is_not_output(marked, word, text):
    ids = ids_of(marked, "ab🙂c")
    for chunks in ([ids], [[token] for token in ids]):
        outputs, _ = run(marked, chunks, stop_words=(word,))
        assert joined(outputs) == (text, ids[: len(text)], "stop")


PIECES = ["a", "b", "ab", " ", "é", TURN, TOOL]
WORDS = [
    TURN,
    "é",
    f"a{TURN}",
    f"{TURN}b",
    "ab",
    f"b{TURN}{TURN}a",
    f"é{TOOL}a",
    "ba",
    f"{TOOL} ",
    TURN[1:],
    f"|>a{TURN}",
]


def first_stop(tokenizer, ids, words, min_tokens):
    """The text and the tokens before the stop word that is complete first, by looking at all text again and again."""
    shown, spelled, ends = "", "", []  # ends: of each token, in the text with special tokens
    places = [0]  # of each character that is shown, in the text with special tokens
    detokenizer_text = ""
    for number, token in enumerate(ids, 1):
        name = tokenizer.special_tokens.get(token)
        text = tokenizer.decode(ids[:number])
        new = text[len(detokenizer_text) :] if not text.endswith("\ufffd") else ""
        detokenizer_text += new
        before = len(shown), len(spelled)
        places[-1:] = [len(spelled) + i for i in range(len(new) + 1)]
        shown, spelled = shown + new, spelled + (name or new)
        if name:
            places[-1] = len(spelled)
        ends.append(len(spelled) + (name is None and text.endswith("\ufffd")))  # it begins the next character
        found = []
        for word in words:
            for of, start, is_spelled in ((shown, before[0], False), (spelled, before[1], True)):
                if is_spelled and not any(token in word for token in tokenizer.special_tokens.values()):
                    continue
                for end in range(max(start + 1, len(word)), len(of) + 1):
                    if of[:end].endswith(word):
                        begin = end - len(word) if is_spelled else places[end - len(word)]
                        found.append((end - start, begin))
        if found and number > min_tokens:
            begin = min(found)[1]
            kept = [token for token, end in zip(ids, ends, strict=False) if end <= begin]
            return sum(place < begin for place in places[: len(shown)]), kept, "stop"
    return len(shown), list(ids), "length"


@settings(max_examples=examples(1600))
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    words=st.lists(st.sampled_from(WORDS), max_size=3),
    sizes=st.lists(st.integers(1, 4), max_size=15),
    min_tokens=st.integers(0, 4),
)
def test_any_chunking_stops_at_the_word_that_is_complete_first(marked, pieces, words, sizes, min_tokens):
    ids = ids_of(marked, "".join(pieces))
    num_chars, kept, reason = first_stop(marked, ids, words, min_tokens)
    expected = marked.decode(ids)[:num_chars], kept, reason
    fields = {"stop_words": tuple(words), "min_tokens": min_tokens}
    assert joined(run(marked, [ids], **fields)[0]) == expected
    assert joined(run(marked, cut(ids, sizes), **fields)[0]) == expected


def params_of(tokenizer, **fields):
    executor = ScriptExecutor()
    executor.vocab_size = tokenizer.vocab_size
    TextGenerator(executor, tokenizer).submit("r", TextRequest(text="a", **fields), print)
    return executor.request.params


def test_bad_words_and_biases_act_on_special_tokens(marked):
    turn = marked.token_id(TURN)
    assert (turn,) in params_of(marked, bad_words=(TURN,)).bad_words
    assert tuple(ids_of(marked, f"ab{TURN}")) in params_of(marked, bad_words=(f"ab{TURN}",)).bad_words
    weights = {"embedding_bias_words": (TURN, "a"), "embedding_bias_weights": (9.0, 1.0)}
    assert dict(params_of(marked, **weights).logit_bias) == {turn: 9.0, marked.token_id("a"): 1.0}


@pytest.mark.parametrize("metaspace", [False, True])
def test_a_bad_word_of_sentencepiece_is_banned_after_a_line_s_end_and_after_a_space(metaspace):
    tokenizer = Tokenizer(sentencepiece_backend(metaspace).to_str())
    banned = params_of(tokenizer, bad_words=("the",)).bad_words
    assert set(banned) == {(tokenizer.token_id("▁the"),), (tokenizer.token_id("t"), tokenizer.token_id("he"))}


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("parses", [False, True])
def test_special_tokens_of_a_prompt_are_read_where_that_is_asked_for(marked, adds, parses):
    prompt = f"{TURN}ab{TOOL}"
    executor = ScriptExecutor()
    executor.vocab_size = marked.vocab_size
    request = TextRequest(text=prompt, add_special_tokens=adds, parse_special_tokens=parses)
    TextGenerator(executor, marked).submit("r", request, print)
    expected = marked.encode(prompt, add_special_tokens=adds, parse_special_tokens=parses)
    assert executor.request.tokens[: len(expected)].tolist() == expected
    assert (marked.token_id(TURN) in expected, expected[0] == 1) == (parses, adds)
