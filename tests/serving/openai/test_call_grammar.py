"""Grammars of calls: each family's texts are in them, in whatever tokens, and wrong arguments are not."""

import json

import pytest

from faser_trtllm.guided.grammar import compile_source, open_tokenizer
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.openai.chat.call_grammar import CallGrammar, Thinking, envelope_of
from faser_trtllm.serving.openai.chat.tools import Function, Tools
from tests.support.scripted_model import END, write_scripted

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CONTENT = {"type": "object", "properties": {"b": {"const": "//#"}}, "required": ["b"], "additionalProperties": False}
F, FOO = Function("f", SCHEMA, False), Function("foo", None, False)
GOOD = {
    "hermes": [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "foo", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"a":  1, "x": 2}}\n</tool_call>',
    ],
    "llama3_json": [
        '{"name": "f", "parameters": {"a": 1}}',
        '{"name": "f", "parameters": {"a": 1}}; {"name": "foo", "parameters": {}}',
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "foo", "arguments": {}}]',
    ],
    "mistral with [ARGS]": ['[TOOL_CALLS]f[ARGS]{"a": 1}', '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]foo[ARGS]{}'],
}
FAMILIES = sorted(GOOD)


def tools(choice="auto", named=None, is_parallel=True, strict=True):
    f = Function("f", SCHEMA, strict)
    return Tools((), (f, FOO), choice, named, is_parallel)


class Language:
    """What a grammar allows."""

    def __init__(self, directory, family):
        added = (*MARKS, "[ARGS]") if "ARGS" in family else MARKS
        write_scripted(directory, {"<|a|>": ("x1",)}, "", added)
        self.tokenizer = Tokenizer.load(directory)
        self._guide = open_tokenizer(self.tokenizer.definition, self.tokenizer.vocab_size, [self.id(END)])
        self.envelope = envelope_of(family.partition(" ")[0], self.tokenizer)
        self.grammar = CallGrammar(self.tokenizer)

    def id(self, text):
        return self.tokenizer.token_id(text)

    def holds(self, grammar, text):
        """Whether the grammar has the text, which is one answer for its tokens and for its bytes, but that no text has
        special tokens."""
        from llguidance import LLMatcher

        spellings = [self.tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=True), [*text.encode()]]
        found = []
        for ids in spellings:
            matcher, error = compile_source(self._guide, LLMatcher.grammar_from_lark(grammar))
            assert not error, error
            found.append(
                matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()
            )
        assert found[0] == found[1], text
        return found[0]


@pytest.fixture(scope="module", params=FAMILIES)
def language(request, tmp_path_factory):
    made = Language(tmp_path_factory.mktemp("language"), request.param)
    made.good = GOOD[request.param]
    return made


def test_a_forced_answer_is_a_call(language):
    forced = language.grammar.of_calls(tools("required"), language.envelope, None)
    one, two = language.good
    assert all(language.holds(forced, text) for text in (one, two))
    assert language.holds(forced, one.replace("1", "-27"))
    for wrong in (one.replace("1", '"1"'), one.replace('"a"', '"b"'), one.replace("f", "g"), f"Hi. {one}", one + "x"):
        assert not language.holds(forced, wrong)
    single = language.grammar.of_calls(tools("required", is_parallel=False), language.envelope, None)
    assert [language.holds(single, text) for text in (one, two)] == [True, False]
    named = language.grammar.of_calls(tools("required", "f", False), language.envelope, None)
    assert language.holds(named, one)
    assert not language.holds(named, one.replace('{"a": 1}', "{}").replace("f", "foo"))


def test_text_is_free_up_to_a_strict_call(language):
    free = language.grammar.of_calls(tools(), language.envelope, None)
    begin = language.envelope.begin
    for text in ("", "Hello {there}.", "naïve\n😀 [1]"):
        assert language.holds(free, text)
        if begin:
            for call in language.good:
                assert language.holds(free, f"{text}{call}")
    one, two = language.good
    assert language.holds(free, one)
    assert language.holds(free, two)
    assert not language.holds(free, one.replace("1", '"1"'))
    if begin:
        assert not language.holds(free, f"Hi. {one.replace('1', '1.5')}")
        assert not language.holds(free, f"Hi. {begin} is how it begins")
    loose = language.grammar.of_calls(tools(strict=False), language.envelope, None)
    assert language.holds(loose, one.replace("1", '"1"'))


def test_reasoning_comes_first(language):
    one, _ = language.good
    for has_started in (False, True):
        thinking = Thinking("<think>", "</think>", has_started)
        thought = ("" if has_started else "<think>") + "\nHm, 😀 < think > or /think?\n</think>"
        forced = language.grammar.of_calls(tools("required"), language.envelope, thinking)
        free = language.grammar.of_calls(tools(), language.envelope, thinking)
        for grammar in (forced, free):
            for text in (f"{thought}\n\n{one}", f"{thought}{one}"):
                assert language.holds(grammar, text)
            assert not language.holds(grammar, f"{thought}{one.replace('1', 'null')}")
            assert language.holds(grammar, one) != has_started
        assert not language.holds(forced, f"{thought}Hi.")
        assert language.holds(free, f"{thought}Hi.")
        content = language.grammar.of_content(CONTENT, thinking)
        assert language.holds(content, f'{thought}{{"b": "//#"}}')
        assert not language.holds(content, f'{thought}{{"b": "//"}}')


def test_an_answer_without_a_call_follows_its_own_schema(language):
    if not language.envelope.begin:
        return  # such requests are refused
    both = language.grammar.of_calls(tools(), language.envelope, None, CONTENT)
    assert language.holds(both, language.good[0])
    assert language.holds(both, json.dumps({"b": "//#"}))
    assert not language.holds(both, "Hi.")


def test_texts_for_people_are_not_in_the_grammar(language):
    """But names and values are, whatever they are called."""
    noted = {"description": "says", "title": "says", "default": 1, "type": "integer"}
    schema = {"type": "object", "properties": {"description": noted, "a": {"enum": [{"title": "x"}], "title": "says"}}}
    schema |= {"required": ["description", "a"], "$defs": {"title": noted}}
    described = Tools((), (Function("f", schema, True),), "required", None, False)
    grammar = language.grammar.of_calls(described, language.envelope, None)
    assert "says" not in grammar
    text = language.good[0].replace('{"a": 1}', '{"description": 5, "a": {"title": "x"}}')
    assert language.holds(grammar, text)
    assert not language.holds(grammar, text.replace('"x"', '"y"'))


def test_no_grammar_is_known_of_other_parsers(language):
    assert envelope_of("another", language.tokenizer) is None
