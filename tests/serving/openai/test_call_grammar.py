"""Grammars of calls: each family's texts are in them, in whatever tokens, and wrong arguments are not."""

import json
from random import Random

import numpy as np
import pytest
from llguidance import LLMatcher

from faser_trtllm.guided.grammar import Grammar, compile_source, open_tokenizer
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.openai.chat.call_grammar import CallGrammar, Thinking, envelope_of
from faser_trtllm.serving.openai.chat.tools import Function, Tools
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.parsers.event import ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from faser_trtllm.serving.parsers.registry import make_parser
from tests.support.effort import examples
from tests.support.scripted_model import END, write_scripted

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>")
BAR, SPACE = "\uff5c", "\u2581"
DEEPSEEK = tuple(
    f"<{BAR}tool{SPACE}{name.replace('_', SPACE)}{BAR}>"
    for name in ("calls_begin", "calls_end", "call_begin", "call_end", "sep")
)
FIRST, LAST, BEGIN, END_OF_CALL, SEP = DEEPSEEK
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
    "deepseek_v3": [
        f'{FIRST}{BEGIN}function{SEP}f\n```json\n{{"a": 1}}\n```{END_OF_CALL}{LAST}',
        f'{FIRST}{BEGIN}function{SEP}f\n```json\n{{"a": 1}}\n```{END_OF_CALL}\n'
        f"{BEGIN}function{SEP}foo\n```json\n{{}}\n```{END_OF_CALL}{LAST}",
    ],
    "deepseek_v31": [
        f'{FIRST}{BEGIN}f{SEP}{{"a": 1}}{END_OF_CALL}{LAST}',
        f'{FIRST}{BEGIN}f{SEP}{{"a": 1}}{END_OF_CALL}{BEGIN}foo{SEP}{{}}{END_OF_CALL}{LAST}',
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
    """A family's tokenizer, and the texts that its grammars allow."""

    def __init__(self, directory, family):
        added = (*MARKS, *DEEPSEEK, "[ARGS]") if "ARGS" in family else (*MARKS, *DEEPSEEK)
        write_scripted(directory, {"<|a|>": ("x1",)}, "", added)
        self.tokenizer = Tokenizer.load(directory)
        self.family = family
        self._guide = open_tokenizer(self.tokenizer.definition, self.tokenizer.vocab_size, [self.id(END)])
        self.envelope = envelope_of(family.partition(" ")[0], self.tokenizer)
        self.grammar = CallGrammar(self.tokenizer)

    def id(self, text):
        return self.tokenizer.token_id(text)

    def holds(self, grammar, text):
        """Return whether the grammar allows the text. The answer must be the same for its tokens and for its bytes; no
        text has special tokens."""
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

    def draw(self, grammar, random, max_tokens=400, ends=0.0):
        """(a text that the grammar allows, whether it is whole); the first part of longer ones."""
        matcher, _ = compile_source(self._guide, LLMatcher.grammar_from_lark(grammar))
        state, ids = Grammar(matcher, self._guide.eos_tokens).start([self.id(END)]), []
        mask = np.zeros(-(-self.tokenizer.vocab_size // 32), np.uint32)
        while len(ids) < max_tokens:
            state.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            marks = [i for i in allowed if self.tokenizer.token(i) in (*MARKS, *DEEPSEEK, "[ARGS]")]
            token = int(random.choice(marks if marks and random.random() < 0.5 else allowed))
            if self.id(END) in allowed and (token == self.id(END) or (len(ids) > 40 and random.random() < ends)):
                break
            ids.append(token)
            state.advance([token])
        return self.tokenizer.decode(ids, skip_special_tokens=False), state.is_complete


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
    begin = "" if language.envelope.may_open else language.envelope.begin
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


def test_a_tag_within_the_text_begins_a_strict_call(language):
    if not language.envelope.may_open:
        return
    one, two = language.good
    for thinking, before in ((None, ""), (Thinking("<think>", "</think>", False), "<think>x</think>")):
        free = language.grammar.of_calls(tools(), language.envelope, thinking)
        for text in ("", "Hm.", f"{before}Hm. "):
            for call in (one, two):
                assert language.holds(free, f"{text}<|python_tag|>{call}")
            assert not language.holds(free, f"{text}<|python_tag|>{one.replace('1', 'true')}")
            assert not language.holds(free, f"{text}<|python_tag|>text")
        assert not language.holds(free, f" {one.replace('1', 'true')}")


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
    if language.envelope.may_open:
        return  # such requests are refused
    both = language.grammar.of_calls(tools(), language.envelope, None, CONTENT)
    assert language.holds(both, language.good[0])
    assert language.holds(both, json.dumps({"b": "//#"}))
    assert not language.holds(both, "Hi.")


STRICT = {
    "type": "object",
    "properties": {"a": {"enum": ["x", '"}</tool_call>[TOOL_CALLS]', "\\n"]}, "b": {"type": "array", "maxItems": 2}},
    "required": ["a"],
    "additionalProperties": False,
}
STRICT["properties"]["b"]["items"] = {"type": ["integer", "null"], "minimum": -9, "maximum": 9}


@pytest.mark.parametrize("has_started", [None, False, True])
def test_whatever_a_forced_answer_is_the_parser_reads_calls(language, has_started):
    """Answers drawn at random from all that the grammar allows."""
    random = Random(5)
    thinking = None if has_started is None else Thinking("<think>", "</think>", has_started)
    asked = Tools((), (Function("f", STRICT, False), FOO), "required", None, True)
    definitions = [{"type": "function", "function": {"name": name}} for name in ("f", "foo")]
    grammar = language.grammar.of_calls(asked, language.envelope, thinking)
    num_whole = 0
    for _ in range(examples(100)):
        text, is_whole = language.draw(grammar, random)
        num_whole += is_whole
        reasoning = None if thinking is None else "qwen3"
        family = language.family.partition(" ")[0]
        parser = make_parser(family, reasoning, tools=definitions, starts_in_reasoning=bool(has_started))
        calls = []
        for event in (*parser.feed(text), *parser.finish()):
            if isinstance(event, ToolCallStart):
                calls.append((event.name, []))
            elif isinstance(event, ToolArgumentsDelta):
                calls[-1][1].append(event.text)
            elif is_whole:
                assert isinstance(event, ReasoningDelta) or not event.text.strip(), text
        if is_whole:
            assert calls, text
            for name, pieces in calls:
                arguments = json.loads("".join(pieces))
                assert arguments == {} if name == "foo" else arguments["a"] in STRICT["properties"]["a"]["enum"]
    assert num_whole > 0


TAGGED = {
    "type": "object",
    "$defs": {"Mood": {"enum": ["good", "so so"], "type": "string"}, "Point": {"type": "array", "items": {"const": 1}}},
    "properties": {
        "text": {"type": "string", "description": "any"},
        "short": {"type": "string", "minLength": 1, "maxLength": 5},
        "mood": {"$ref": "#/$defs/Mood"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "flag": {"type": ["boolean", "null"]},
        "points": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "maxItems": 2},
    },
    "required": ["short", "count"],
    "additionalProperties": False,
}


def parsed(text, tools):
    """(calls with their arguments, other text)"""
    parser = make_parser("qwen3_coder", None, tools=tools, starts_in_reasoning=False)
    calls, content = [], ""
    for event in (*parser.feed(text), *parser.finish()):
        if isinstance(event, ToolCallStart):
            calls.append((event.name, []))
        elif isinstance(event, ToolArgumentsDelta):
            calls[-1][1].append(event.text)
        else:
            content += event.text
    return [(name, json.loads("".join(pieces))) for name, pieces in calls], content


@pytest.mark.parametrize("is_strict", [False, True])
def test_arguments_in_tags_follow_what_their_texts_can(tmp_path, is_strict):
    """Forced ones, and strict ones where text comes before."""
    language, random = Language(tmp_path, "qwen3_coder"), Random(7)
    functions = (Function("f", TAGGED, is_strict), FOO)
    asked = Tools((), functions, "auto" if is_strict else "required", None, True)
    grammar = language.grammar.of_calls(asked, language.envelope, None)
    definitions = [{"type": "function", "function": {"name": "f", "parameters": TAGGED}}]
    definitions.append({"type": "function", "function": {"name": "foo"}})
    num_calls = 0
    for _ in range(examples(200)):
        text, is_whole = language.draw(grammar, random, ends=0.3)
        if not is_whole:
            continue
        calls, content = parsed(text, definitions)
        assert is_strict or calls, text
        assert is_strict or not content.strip()
        for name, arguments in calls:
            assert set(arguments) <= (set(TAGGED["properties"]) if name == "f" else set())
            if name == "f":
                num_calls += 1
                assert 1 <= len(arguments["short"]) <= 5
                assert arguments["count"] in range(100)
                assert arguments.get("mood", "good") in ("good", "so so")
                assert isinstance(arguments.get("text", ""), str)
                assert isinstance(arguments.get("maybe"), str | None)
                assert arguments.get("flag") in (None, True, False)
                assert all(set(point) <= {1} for point in arguments.get("points", []))
    assert num_calls > 0
    for key, wrong in (("f", {"pattern": "a"}), ("f", {"anyOf": [{"$ref": "#/$defs/Point"}]}), ("a>b", {})):
        schema = {"type": "object", "properties": {key: {"type": "string"} | wrong}}
        schema["properties"][key] = schema["properties"][key] if wrong.get("anyOf") is None else wrong
        refused = Tools((), (Function("g", schema, True),), "required", None, True)
        with pytest.raises(RequestError, match=rf"tools has {key} of g, whose schema cannot be enforced"):
            language.grammar.of_calls(refused, language.envelope, None)


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        ({"properties": {"a": {"type": "string", "anyOf": [True]}}}, "a"),
        ({"properties": {"a": {"type": "string", "anyOf": 5}}}, "a"),
        ({"properties": {"a": {"anyOf": 5}}}, "a"),
        ({"properties": {"a": {"type": [["string"]]}}}, "a"),
        ({"properties": {"a": {"type": "string"}}, "required": [["a"]]}, "required"),
        ({"properties": {"a": {"type": "string"}}, "required": [{}]}, "required"),
        ({"$defs": [], "properties": {"a": {"$ref": "#/$defs/x"}}}, "a"),
        # The parser reads this text as null, which the enumeration does not have.
        ({"properties": {"a": {"type": ["string", "null"], "enum": ["none", "low"]}}}, "a"),
    ],
)
def test_arguments_in_tags_that_no_grammar_can_enforce_are_refused(tmp_path, schema, at):
    language = Language(tmp_path, "qwen3_coder")
    asked = Tools((), (Function("g", {"type": "object"} | schema, True),), "required", None, True)
    with pytest.raises(RequestError, match=rf"tools has {at} of g, whose schema cannot be enforced"):
        language.grammar.of_calls(asked, language.envelope, None)


def test_other_arguments_in_tags_are_free(tmp_path):
    language = Language(tmp_path, "qwen3_coder")
    asked = Tools((), (Function("f", TAGGED, False), Function("foo", None, True)), "auto", None, True)
    free = language.grammar.of_calls(asked, language.envelope, None)
    for arguments in ("", "<parameter=x>\n1\n</parameter>\n", "<parameter=count>many</parameter>"):
        assert language.holds(free, f"Hi.<tool_call>\n<function=f>\n{arguments}</function>\n</tool_call> Bye.")
        assert language.holds(free, f"<function=f>\n{arguments}</function>")
        is_known = not arguments
        assert language.holds(free, f"<function=foo>\n{arguments}</function>") == is_known
    assert not language.holds(free, "Hi.<function=g>\n</function>")


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
