"""Text that is too long is refused before all of it was tokenized, and no other is."""

import pytest
from tokenizers import Tokenizer as Backend

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.text.length_check import MIN_CHECKED_CHARS, LengthCheck
from tests.support.checkpoints import END_OF_TEXT, write_tokenizer

LONG = "~" * 100  # one token
MAX_SEQ_LEN = 20_000


@pytest.fixture
def tokenizer(tmp_path):
    write_tokenizer(tmp_path, 320)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([LONG])
    return Tokenizer(backend.to_str())


@pytest.fixture
def sizes(tokenizer, monkeypatch):
    """Characters of each text that was tokenized."""
    found, encode = [], tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **_: found.append(len(text)) or encode(text))
    return found


def test_of_a_text_that_is_too_long_the_beginning_is_tokenized(tokenizer, sizes):
    text = "ab ~ " * 600_000
    with pytest.raises(InvalidArgumentError) as caught:
        LengthCheck(tokenizer, MAX_SEQ_LEN).check("text_input", text)
    message = str(caught.value)
    assert message.startswith("text_input has 3000000 characters, of which the first 160000 are ")
    assert message.endswith(
        " tokens; the engine takes at most 19999 (max_seq_len 20000 with one token of output); shorten the prompt"
    )
    assert sizes == [8 * MAX_SEQ_LEN]


def test_text_of_few_long_tokens_may_have_many_characters(tokenizer, sizes):
    check = LengthCheck(tokenizer, MAX_SEQ_LEN)
    check.check("text_input", LONG * (MAX_SEQ_LEN - 1))
    assert sizes == [160_000, 640_000]
    with pytest.raises(InvalidArgumentError, match="of which the first 160000 are"):
        check.check("text_input", "ab" * 70_000 + LONG * (MAX_SEQ_LEN - 1))


def test_what_no_tokens_could_make_short_enough_is_not_tokenized(tokenizer, sizes):
    with pytest.raises(InvalidArgumentError, match="max_seq_len 512 leaves room for 204800 at most"):
        LengthCheck(tokenizer, 512).check("QUERY", "a" * 204_801)
    assert not sizes


def test_text_that_is_tokenized_fast_is_left_to_the_engine(tokenizer, sizes):
    LengthCheck(tokenizer, 512).check("text_input", "a" * MIN_CHECKED_CHARS)
    assert not sizes


def test_special_tokens_that_are_read_count_as_one_each(tmp_path):
    write_tokenizer(tmp_path, 320)
    check = LengthCheck(Tokenizer.load(tmp_path), 4 * MIN_CHECKED_CHARS // len(END_OF_TEXT))
    text = END_OF_TEXT * (3 * MIN_CHECKED_CHARS // len(END_OF_TEXT))
    check.check("text_input", text, parse_special_tokens=True)
    with pytest.raises(InvalidArgumentError, match="of which the first"):
        check.check("text_input", text)
