"""Tests of how each family's texts are parsed, including texts that are not calls."""

import json

import pytest

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.parsers.registry import detect, make_parser, parser_names, reasoning_marks
from tests.support.parsed_output import FAMILIES, TOOLS, WRITERS, Parsed, Reading, deepseek

F1 = '{"name": "f", "arguments": {"a": 1}}'
CALL = ("f", None, '{"a": 1}')
NONE = ("get_time", None, "{}")
BEGIN, END, CALL_BEGIN, CALL_END, SEP = map(deepseek, ("calls_begin", "calls_end", "call_begin", "call_end", "sep"))
COMMENTARY, AGAIN, A1 = "<|channel|>commentary", "<|end|><|start|>assistant<|channel|>", '{"a": 1}'


@pytest.mark.parametrize("written", WRITERS)
def test_calls_next_to_text(written):
    """White space next to marks belongs to the format, that within the text does not."""
    family, write = WRITERS[written]
    calls = (("f", None, '{"a": 1}'), ("get_time", None, "{}"))
    text = write([(name, arguments) for name, _, arguments in calls])
    assert Reading(family).parse(text) == Parsed("", "", calls)
    assert Reading(family).parse(f" \n Let me\n look.\n\n{text}\n") == Parsed(" \n Let me\n look.", "", calls)
    assert Reading(family).parse(f"{text}\n Done. \n") == Parsed("Done. \n", "", calls)
    if family == "openai":
        return  # reasoning is in a message of its own
    thought = "\n\nThe user\nwants <this>.\n\n"
    assert Reading(family, "qwen3").parse(f"<think>{thought}</think>\n\n{text}") == Parsed("", thought.strip(), calls)


WHOLE = {
    "hermes": [
        # both orders, an id, no arguments, no space, no closing mark, no closing brace
        ('<tool_call>{"arguments":{"a": 1},"name":"f"}</tool_call>', "", [CALL]),
        ('<tool_call>{"id": "x7", "type": "function", "name": "f", "arguments": {}}', "", [("f", "x7", "{}")]),
        ('<tool_call>{"name": "get_time"}</tool_call>', "", [NONE]),
        (f"<tool_call>{F1}<tool_call>{F1}", "", [CALL, CALL]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call> So.', "So.", [CALL]),
        # a name with escapes, and notes after the arguments
        (
            '<tool_call>{"name": "\\u0066", "arguments": {"a": 1}, "x": [{"}": 1}], "y": -1}</tool_call>.',
            ".",
            [CALL],
        ),
        # arguments that are no JSON, up to the bracket that closes them
        ('<tool_call>{"name": "f", "arguments": {\'a\': None,}}</tool_call>', "", [("f", None, "{'a': None,}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', "", [("f", None, '{"a": "1\n2"}')]),
        # what stands instead of a call is content
        ('A <tool_call>{"name": "g", "arguments": {}}</tool_call>', None, []),
        ("A <tool_call>\n not JSON </tool_call>", None, []),
        ('<tool_call>{"name": "f", "arguments": 5}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', None, []),
        ('<tool_call>{"name": ["f"], "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "\\x", "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"arguments": {}, "arguments": {}, "name": "f"}</tool_call>', None, []),
        ('<tool_call>{"arguments": {}}</tool_call>', None, []),
        ("<tool_call>{}</tool_call>", None, []),
        ('{"name": "f", "arguments": {}} </tool_call>', None, []),
        # a call after one that is none, and text in place of what belongs to the call
        (f"<tool_call>\n<tool_call>{F1}</tool_call>", "<tool_call>", [CALL]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, oops}</tool_call>', ", oops}</tool_call>", [CALL]),
        (f"<tool_call>{F1}}}</tool_call>", "}</tool_call>", [CALL]),
        # marks in strings
        (
            '<tool_call>{"name": "f", "arguments": {"b": "</tool_call><tool_call><think>"}}</tool_call>',
            "",
            [("f", None, '{"b": "</tool_call><tool_call><think>"}')],
        ),
    ],
    "llama3_json": [
        ('{"name": "f", "parameters": {"a": 1}}', "", [CALL]),
        (
            '\n{"type": "function", "name": "f", "parameters": {"a": 1}}; <|python_tag|>{"name": "get_time"}',
            "",
            [CALL, NONE],
        ),
        (f"{F1};{F1}\n{F1}", "", [CALL] * 3),
        (f"Hm. <|python_tag|>{F1} Done.", "Hm.Done.", [CALL]),
        (f"Hm. {F1}", None, []),
        ('<|python_tag|>brave_search.call(query="f")', None, []),
        ('{"name": "Alice", "age": 3}', None, []),
        ('{"answer": 1}', None, []),
        (f"{F1}; and", "; and", [CALL]),
        (f"; {F1}", None, []),
    ],
    "mistral": [
        (f"[TOOL_CALLS][{F1}]", "", [CALL]),
        (f"[TOOL_CALLS] {F1}", "", [CALL]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "VvvODy9mT"}]', "", [CALL]),
        ('[TOOL_CALLS] [{"id": "VvvODy9mT", "name": "get_time"}]', "", [("get_time", "VvvODy9mT", "{}")]),
        ('[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]{"a": 1}', "", [("f", "VvvODy9mT", '{"a": 1}')]),
        ('Hm.[TOOL_CALLS]f [ARGS] {"a": 1} Hm.[TOOL_CALLS]get_time{}', "Hm.Hm.", [CALL, NONE]),
        (f"[TOOL_CALLS] [{F1}, {{}}]", ", {}]", [CALL]),
        (f"[TOOL_CALLS] [{F1} Hm.", "Hm.", [CALL]),
        ('[TOOL_CALLS]g[ARGS]{"a": 1}', None, []),
        ("[TOOL_CALLS] []", None, []),
        (f"[TOOL_CALLS] {'x' * 600} {{", None, []),
        (F1, None, []),
    ],
    "deepseek_v3": [
        (f'{CALL_BEGIN}function{SEP}f\n```json\n{{"a": 1}}\n```{CALL_END}', "", [CALL]),
        (f'{BEGIN}{CALL_BEGIN}function{SEP}f\n```json\n{{"a": 1}}{CALL_END}{END} ok', "ok", [CALL]),
        (f'{BEGIN}{CALL_BEGIN}f{SEP}{{"a": 1}}{CALL_END}{CALL_BEGIN}get_time{SEP}{{}}{END}', "", [CALL, NONE]),
        (f"{BEGIN}{CALL_BEGIN}function{SEP}g\n```json\n{{}}\n```{CALL_END}{END}", None, []),
        (f"{BEGIN}{CALL_BEGIN}function{SEP}f\n```python\n{{}}\n```{CALL_END}{END}", None, []),
        (f"{BEGIN}Hello", None, []),
    ],
    "openai": [
        # the recipient in either place, with and without a type and the name of the functions' namespace
        (f"{COMMENTARY} to=functions.f <|constrain|>json<|message|>{A1}<|call|>", "", [CALL]),
        (f"{COMMENTARY} to=functions.f<|constrain|>json<|message|>{A1}", "", [CALL]),
        (f" to=functions.f{COMMENTARY} json<|message|>{A1}<|call|>", "", [CALL]),
        (f"{COMMENTARY} to=f<|message|>\n{A1}\n<|end|>", "", [CALL]),
        (f"<|channel|>analysis to=functions.f<|message|>{A1}<|call|>", "", [CALL]),
        (f"<|start|>assistant{COMMENTARY} to=functions.get_time<|message|>{{}}<|call|>", "", [NONE]),
        # the final message, a preamble, both with other messages
        ("<|channel|>final<|message|>Hi.<|return|>", "Hi.", []),
        ("<|channel|>final <|constrain|>json<|message|>[1]", "[1]", []),
        (f"{COMMENTARY}<|message|>A plan.<|end|><|start|>assistant{COMMENTARY} to=f<|message|>{A1}", "A plan.", [CALL]),
        (f"{COMMENTARY}<|message|>A.<|end|><|start|>assistant<|channel|>final<|message|>B.", "A.\nB.", []),
        (f"<|channel|>final<|message|>A.<|channel|>final<|message|>B.{AGAIN}final<|message|><|return|>", "A.\nB.", []),
        ("<|channel|>final<|message|>Hi.\n", "Hi.\n", []),
        # what is no call of a known function, and arguments that are no object
        (f"{COMMENTARY} to=functions.g <|constrain|>json<|message|>{A1}", None, []),
        (f"{COMMENTARY} to=browser.search<|message|>{A1}", None, []),
        (f"{COMMENTARY} to=functions.f<|message|>[1]", None, []),
        (f"{COMMENTARY} to=functions.f<|message|>", None, []),
        (
            f"Hi.<|end|><|start|>assistant{COMMENTARY} to=g<|message|>x",
            f"Hi.\n<|start|>assistant{COMMENTARY} to=g<|message|>x",
            [],
        ),
        (f"{COMMENTARY} to=f<|message|>{A1} so<|end|>", "so", [CALL]),
        # what is no message
        ("Hi.", None, []),
        (" \n Hi.<|return|>", " \n Hi.", []),
        ("<|channel|>thoughts<|message|>Hm.", None, []),
        ("<|channel|>finally<|message|>Hm.", None, []),
        ("<|channel|>final Hi there.", None, []),
        ("<|channel|><|message|>Hi.", None, []),
        ("<|message|>Hi.", None, []),
        ("<|start|>user<|message|>Hi.", None, []),
        (f"<|channel|>final to={'x' * 300}<|message|>Hi.", None, []),
        ("<|channel|>final<|message|>Write <|end|> or <|start|>user.", "Write <|end|> or <|start|>user.", []),
        # marks in strings
        (
            f'{COMMENTARY} to=f<|message|>{{"b": "<|call|><|end|>"}}<|call|>',
            "",
            [("f", None, '{"b": "<|call|><|end|>"}')],
        ),
    ],
    "qwen3_coder": [
        ("<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", "", [CALL]),
        ("<tool_call><function=get_time></function></tool_call>", "", [NONE]),
        (
            '<tool_call>\n<function=f>\n<parameter=b>\n\n "x"\n\ty\n\n</parameter>\n<parameter=c d>1</parameter>'
            "</function></tool_call>",
            "",
            [("f", None, '{"b": "\\n \\"x\\"\\n\\ty\\n", "c d": "1"}')],
        ),
        (
            "<function=f><parameter=a>1</parameter><parameter=b></function></tool_call></parameter></function>",
            "",
            [("f", None, '{"a": 1, "b": "</function></tool_call>"}')],
        ),
        ("<tool_call>\n<function=g>\n</function>\n</tool_call>", None, []),
        ("<tool_call>\nf\n</tool_call>", None, []),
        (
            "<function=f><parameter=a>1</parameter>oops</function></tool_call>",
            "oops</function></tool_call>",
            [("f", None, '{"a": 1')],
        ),
    ],
}


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"), [(family, *row) for family, rows in WHOLE.items() for row in rows]
)
def test_whole_texts(family, text, content, calls):
    """content None: the text is content as it was written."""
    assert Reading(family).parse(text) == Parsed(text if content is None else content, "", tuple(calls))


CUT = [
    ("hermes", "Hi.\n<tool_ca", "Hi.\n<tool_ca", []),
    ("hermes", 'Hi.\n<tool_call>\n{"name": "f", "arguments":', 'Hi.\n<tool_call>\n{"name": "f", "arguments":', []),
    ("hermes", 'Hi.\n<tool_call>\n{"name": "f", "arguments": {"a', "Hi.", [("f", None, '{"a')]),
    ("hermes", f"<tool_call>{F1[:-1]}", "", [CALL]),
    ("hermes", f"<tool_call>{F1}\n</tool_", "", [CALL]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "na', '<tool_call>{"arguments": {"a": 1}, "na', []),
    ("mistral", f'[TOOL_CALLS][{F1}, {{"name"', ', {"name"', [CALL]),
    ("openai", f"Hi.{AGAIN}comment", "Hi.\n<|start|>assistant<|channel|>comment", []),
    ("openai", f"Hi.{AGAIN}commentary to=f<|mess", f"Hi.\n<|start|>assistant{COMMENTARY} to=f<|mess", []),
    ("openai", f'{COMMENTARY} to=f<|message|>{{"a', "", [("f", None, '{"a')]),
    ("openai", "<|channel|>final<|message|>Hi.<|e", "Hi.<|e", []),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter><parameter=b>long", "", [("f", None, '{"a": 1')]),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), CUT)
def test_texts_that_max_tokens_cuts(family, text, content, calls):
    """Calls that are certain keep what there is of their arguments; the beginning of another is content."""
    assert Reading(family).parse(text) == Parsed(content, "", tuple(calls))


CALL_TEXT = f"<tool_call>{F1}</tool_call>"
THOUGHTS = [
    # text, whether the prompt has begun the reasoning, reasoning, content
    ("<think>\nHm.\n</think>\n\nHi.\n", False, "Hm.", "Hi.\n"),
    (" \n<think>Hm. </think>Hi.", False, "Hm.", "Hi."),
    ("\nHm.\n\n Hm.\n</think>Hi.", True, "Hm.\n\n Hm.", "Hi."),
    ("<think>\nHm.</think>Hi.", True, "Hm.", "Hi."),
    ("<think>\n\n</think>\n\nHi.", False, "", "Hi."),
    ("</think>Hi.", True, "", "Hi."),
    ("Hm.\n", True, "Hm.\n", ""),
    ("<think>Hm.</thi", False, "Hm.</thi", ""),
    ("<thi", False, "", "<thi"),
    ("Hi.", False, "", "Hi."),
    ("\n Hi.", False, "", "\n Hi."),
    ("Hi. <think>Hm.</think>", False, "", "Hi. <think>Hm.</think>"),
    ("Hi.</think>", False, "", "Hi.</think>"),
    ("<think>a<think>b</think>c</think>", False, "a<think>b", "c</think>"),
    (f"<think>I could {CALL_TEXT}.</think>Hi.", False, f"I could {CALL_TEXT}.", "Hi."),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("text", "starts", "reasoning", "content"), THOUGHTS)
@pytest.mark.parametrize("family", [None, "hermes", "llama3_json"])
def test_reasoning(family, text, starts, reasoning, content):
    for parser, (begin, end) in (("deepseek_r1", ("<think>", "</think>")), ("mistral", ("[THINK]", "[/THINK]"))):

        def spelled(part, marks=(begin, end)):
            for mark, ours in zip(("<think>", "</think>"), marks, strict=True):
                part = part.replace(mark, ours).replace(mark[:-3], ours[: len(mark) - 3])
            return part

        found = Reading(family, parser, starts).parse(spelled(text))
        assert found == Parsed(spelled(content), spelled(reasoning))


def test_reasoning_in_arguments_is_text_of_theirs():
    text = '<think>a</think><tool_call>{"name": "f", "arguments": {"b": "<think>x</think>"}}</tool_call>'
    assert Reading("hermes", "qwen3").parse(text) == Parsed("", "a", (("f", None, '{"b": "<think>x</think>"}'),))


VALUES = [
    ({"type": "integer"}, "5", "5"),
    ({"type": "integer"}, " 5 ", "5"),
    ({"type": "integer"}, "5.0", "5.0"),
    ({"type": "integer"}, "5.5", '"5.5"'),
    ({"type": "integer"}, "five", '"five"'),
    ({"type": "integer"}, "true", '"true"'),
    ({"type": "number"}, "1e-3", "1e-3"),
    ({"type": "number"}, "NaN", '"NaN"'),
    ({"type": "number"}, "9" * 5000, json.dumps("9" * 5000)),
    ({"type": "boolean"}, "True", "true"),
    ({"type": "boolean"}, "1", '"1"'),
    ({"type": "integer"}, "None", "null"),
    ({"type": "string"}, "5", '"5"'),
    ({"type": "string"}, "null", '"null"'),
    ({"type": ["string", "null"]}, "None", "null"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", "null"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", "7"),
    ({"oneOf": [{"type": "integer"}, {"enum": ["x"]}]}, "7", '"7"'),
    ({"type": "object"}, '{"x":  [1, "]"]}', '{"x":  [1, "]"]}'),
    ({"type": "object"}, "{'x': 1}", json.dumps("{'x': 1}")),
    ({"type": "object"}, "[1]", '"[1]"'),
    ({"type": "array"}, "[1,\n2]", "[1,\n2]"),
    ({"type": "array"}, "[" * 5000, json.dumps("[" * 5000)),
    ({"type": "nothing known"}, "1", '"1"'),
    ({}, "1", '"1"'),
    (None, 'a"\\\n😀', '"a\\"\\\\\\n😀"'),
]


@pytest.mark.parametrize(("schema", "value", "expected"), VALUES)
def test_values_of_parameters_in_tags(schema, value, expected):
    properties = {} if schema is None else {"p": schema}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    text = f"<function=f>\n<parameter=p>\n{value}\n</parameter>\n</function>"
    assert Reading("qwen3_coder", tools=tools).parse(text).calls == (("f", None, f'{{"p": {expected}}}'),)


def typed(value, schema, definitions):
    parameters = {"properties": {"p": schema}, "$defs": definitions}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = f"<function=f><parameter=p>{value}</parameter></function>"
    ((_, _, arguments),) = Reading("qwen3_coder", tools=tools).parse(text).calls
    return json.loads(arguments)["p"]


def test_types_are_found_through_references():
    definitions = {"O": {"type": "object"}, "N": {"type": "integer"}, "S": {"type": "string"}}
    text = '{"a": 1}'
    for name in (*definitions, "gone"):
        for schema in ({"$ref": f"#/$defs/{name}"}, {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}):
            assert typed(text, schema, definitions) == (json.loads(text) if name == "O" else text)
            assert typed("None", schema, definitions) == (None if "anyOf" in schema or name in "ON" else "None")


def test_references_that_never_end_make_strings():
    endless = {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * 16}, "B": {"$ref": "#/$defs/B"}}
    for name in endless:
        assert typed("1", {"$ref": f"#/$defs/{name}"}, endless) == "1"
    assert typed("1", {"$ref": "https://example.com/N"}, endless) == "1"


def test_schemas_that_are_none_make_strings():
    for parameters in ({"properties": [1]}, {"properties": {"p": True}}, {"properties": {"p": {"type": [1]}}}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        text = "<function=f><parameter=p>1</parameter></function>"
        assert Reading("qwen3_coder", tools=tools).parse(text).calls == (("f", None, '{"p": "1"}'),)


TEMPLATES = [
    ("{{ m.content }}", (None, None)),
    ('<tool_call>\n{"name": N, "arguments": A}\n</tool_call>', ("hermes", None)),
    ("<think>\n{{ m.reasoning_content }}</think><tool_call>{{ call.arguments }}</tool_call>", ("hermes", "qwen3")),
    ("<tool_call>\n<function=N>\n<parameter=P></think>", ("qwen3_coder", "qwen3")),
    ("<tool_call>{{ name }}\n<arg_key>{{ arguments }}</arg_key></think>", (None, "qwen3")),
    ("[AVAILABLE_TOOLS][TOOL_CALLS] [", ("mistral", None)),
    ("[THINK]{{ m.reasoning }}[/THINK][TOOL_CALLS]{{ name }}[ARGS]", ("mistral", "mistral")),
    ('<|start_header_id|>assistant<|end_header_id|>{"name": "f", "parameters": {}}', ("llama3_json", None)),
    ("<|start_header_id|>assistant<|end_header_id|>{{ m.content }}", (None, None)),
    ("<|start|>assistant<|channel|>final<|message|>{{ m.content }}<think>", ("openai", "openai_gptoss")),
    ("<|channel|>{{ m.content }}", (None, None)),
    (f"<\uff5cAssistant\uff5c><think>{BEGIN}{CALL_BEGIN}{SEP}```json", ("deepseek_v3", "deepseek_r1")),
    (f"<\uff5cAssistant\uff5c></think>{BEGIN}{CALL_BEGIN}{SEP}", ("deepseek_v31", "deepseek_r1")),
]


@pytest.mark.parametrize(("template", "expected"), TEMPLATES)
def test_a_chat_template_tells_the_parsers(template, expected):
    assert detect(template) == expected


def test_names():
    calls, reasoning = parser_names()
    assert {family for family, _ in WRITERS.values()} == set(FAMILIES) == set(calls)
    assert [reasoning_marks(name)[1] for name in reasoning] == ["</think>", "[/THINK]", "<|end|>", "</think>"]
    for names in (("openai", "qwen3"), ("hermes", "openai_gptoss")):
        with pytest.raises(
            InvalidArgumentError, match=r"reasoning_parser is .* read another format than other parsers"
        ):
            make_parser(*names, tools=TOOLS, starts_in_reasoning=False)
    for names in (("unknown", None), (None, "unknown")):
        with pytest.raises(InvalidArgumentError, match="_parser is unknown, allowed are deepseek"):
            make_parser(*names, tools=TOOLS, starts_in_reasoning=False)


def test_without_parsers_all_is_content():
    text = "<think>a</think><tool_call>{}</tool_call> \n"
    assert Reading(None).parse(text) == Parsed(text)
