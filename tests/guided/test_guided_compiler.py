"""Guides are compiled once; what is wrong, or takes too much, is one sentence and nothing worse."""

import json
import resource
from pathlib import Path

import pytest

from faser_trtllm.errors import InvalidArgumentError, UnavailableError
from faser_trtllm.guided import compiler as compiler_module
from faser_trtllm.guided.compiler import GuideCompiler
from faser_trtllm.guided.spec import GuideSpec
from faser_trtllm.models.tokenizer import Tokenizer
from tests.support.triton_server import ROOT

SLOW = json.dumps({"allOf": [{"type": "string", "pattern": f".*{chr(97 + i % 26)}{i}.*"} for i in range(1000)]})


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(ROOT / "engines" / "demo" / "target")


@pytest.fixture(scope="module")
def compiler(tokenizer):
    compiler = GuideCompiler(tokenizer, tokenizer.vocab_size)
    yield compiler
    compiler.close()


# Hundreds of alternatives that may all begin a text: tenths of a second for a mask.
HEAVY = "root ::= (" + " | ".join(f"r{i}" for i in range(300)) + ")+\n"
HEAVY += "\n".join(f'r{i} ::= [a-z]+ "{i}" | [a-z ]* r{(i * 7 + 1) % 300} "x"' for i in range(300))
WIDE = json.dumps({"properties": {f"k{i}": {} for i in range(4000)}})

WRONG = [
    ("json_schema", '{"type": "object"', "is not a valid json_schema: Expecting ',' delimiter: line 1 column 18"),
    ("json_schema", '{"type": "thing"}', "is not a valid json_schema: Invalid type: thing"),
    ("json_schema", '{"not": {}}', 'is not a valid json_schema: Unimplemented keys: ["not"]'),
    ("json_schema", '{"$ref": "http://localhost/x"}', "is not a valid json_schema"),
    ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, "it is nested too deeply"),
    ("regex", "a(b", "is not a valid regex: "),
    ("regex", "(" * 20000 + ")" * 20000, "is not a valid regex"),
    ("ebnf_grammar", 'root ::= "a" b', "is not a valid ebnf_grammar: Rule 'b' not found"),
    ("ebnf_grammar", HEAVY, "its first token cannot be found (parser error: Too many items"),
    ("json_schema", '{"$ref": "#"}', "its first token cannot be found (no continuation is allowed)"),
    ("json_schema", WIDE, "grammar size (number of symbols) too big"),
    ("ebnf_grammar", "root ::= " + "(" * 20000 + '"a"' + ")" * 20000, "it is nested too deeply"),
    ("ebnf_grammar", "start: " + "(" * 20000 + '"a"' + ")" * 20000, "too deeply nested"),
]


@pytest.mark.parametrize(("guide_type", "guide", "message"), WRONG)
def test_a_wrong_guide_is_one_sentence(compiler, guide_type, guide, message):
    with pytest.raises(InvalidArgumentError) as caught:
        compiler.compile(GuideSpec(guide_type, guide))
    assert str(caught.value).startswith("guided_decoding_guide is not a valid ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def memory_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def regex(i):
    return GuideSpec("regex", f"a{{{i + 1}}}")


def multiple_of(number):
    """Return a guide of 41 bytes that compiles to a table of `number` states."""
    return GuideSpec("json_schema", json.dumps({"type": "integer", "multipleOf": number}))


def test_guides_are_kept_until_they_take_too_much_memory(compiler, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_COMPILED_BYTES", 3 << 20)  # a small one counts as 1 MiB
    assert compiler.find(regex(0)) is None
    ids = [id(compiler.compile(regex(i))) for i in range(3)]
    assert [id(compiler.compile(regex(i))) for i in range(3)] == ids
    compiler.find(regex(0))
    compiler.compile(regex(3))
    assert [compiler.find(regex(i)) is None for i in range(4)] == [False, True, False, False], (
        "the one not used longest goes"
    )


def test_guides_of_running_requests_take_memory_too(compiler, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_COMPILED_BYTES", 3 << 20)
    held = [compiler.compile(regex(i)) for i in range(10, 13)]
    with pytest.raises(UnavailableError, match="the guides of running requests take more than 3 MiB; try again later"):
        compiler.compile(regex(13))
    assert [compiler.find(regex(i)) for i in range(10, 13)] == held, "they are no less used for that"
    held.pop()
    compiler.compile(regex(13))


def test_a_client_gets_half_of_what_others_leave(compiler, monkeypatch):
    compiler.release()
    monkeypatch.setattr(compiler_module, "MAX_COMPILED_BYTES", 8 << 20)
    first = [compiler.compile(regex(i), "a") for i in range(30, 34)]
    refusal = "take more than the share of their client, half of what others leave of 8 MiB; try again later"
    with pytest.raises(UnavailableError, match=refusal):
        compiler.compile(regex(34), "a")
    others = [compiler.compile(regex(i), "b") for i in range(35, 37)]
    with pytest.raises(UnavailableError, match=refusal):
        compiler.compile(regex(37), "b")
    assert compiler.find(regex(30)) is first[0], "whoever asks"
    del first[1:]
    compiler.compile(regex(37), "b")
    assert [compiler.find(regex(35)), compiler.find(regex(36))] == others
    assert compiler.find(regex(31)) is None, "it went for another client's"


def test_a_client_s_own_guides_go_first(compiler, monkeypatch):
    compiler.release()
    monkeypatch.setattr(compiler_module, "MAX_COMPILED_BYTES", 8 << 20)
    for i in (40, 41):
        compiler.compile(regex(i), "a")
    for i in range(42, 48):
        compiler.compile(regex(i), "b")
    found = [i for i in range(40, 48) if compiler.find(regex(i))]
    assert found == [40, 41, 45, 46, 47]


def test_the_tokenizer_may_be_opened_before_the_first_guide(tokenizer, monkeypatch):
    compiler = GuideCompiler(tokenizer, tokenizer.vocab_size)
    try:
        compiler.open()
        monkeypatch.setattr(compiler_module, "open_tokenizer", None)
        compiler.compile(regex(0))
    finally:
        compiler.close()

    def refuse(*_):
        raise InvalidArgumentError("no library")

    monkeypatch.setattr(compiler_module, "open_tokenizer", refuse)
    other = GuideCompiler(tokenizer, tokenizer.vocab_size)
    other.open()
    with pytest.raises(InvalidArgumentError, match="no library"):
        other.compile(regex(0))


def test_what_takes_too_long_ends_alone(tokenizer):
    compiler = GuideCompiler(tokenizer, tokenizer.vocab_size, timeout_s=0.5)
    try:
        compiler.compile(regex(0))
        before = memory_bytes()
        for spec in (GuideSpec("json_schema", SLOW), multiple_of(4_000_037)):
            with pytest.raises(
                InvalidArgumentError, match=r"takes more than 0\.5 s or 256 MiB to compile; simplify it"
            ):
                compiler.compile(spec)
        assert memory_bytes() - before < 32 << 20, "what is refused costs this process nothing"
        compiler.compile(regex(1))
    finally:
        compiler.close()


def test_what_takes_too_much_memory_ends_alone(tokenizer):
    compiler = GuideCompiler(tokenizer, tokenizer.vocab_size, timeout_s=60)
    try:
        with pytest.raises(InvalidArgumentError, match="or 256 MiB to compile"):
            compiler.compile(multiple_of(4_000_037))
    finally:
        compiler.close()


def test_a_budget_ends_a_try_and_not_the_guide(compiler):
    slow = multiple_of(100_003)
    assert compiler.compile_quickly(slow, 0.001) is None
    assert compiler.find(slow) is None
    assert compiler.compile_quickly(regex(20), 10.0) is compiler.find(regex(20))
    assert compiler.compile(slow) is compiler.find(slow)


def test_a_probe_that_died_is_started_again(tokenizer):
    compiler = GuideCompiler(tokenizer, tokenizer.vocab_size)
    try:
        compiler.compile(regex(0))
        compiler.close()
        compiler.compile(regex(1))
    finally:
        compiler.close()
