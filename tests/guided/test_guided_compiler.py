"""Guides are compiled once; what is wrong, or takes too much, is one sentence and nothing worse."""

import json
import threading

import pytest

from faser_trtllm.errors import InvalidArgumentError
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
    ("json_schema", '{"type": "object"', "is not a valid json_schema: expected `,` or `}`"),
    ("json_schema", '{"type": "thing"}', "is not a valid json_schema: Invalid type: thing"),
    ("json_schema", '{"not": {}}', 'is not a valid json_schema: Unimplemented keys: ["not"]'),
    ("json_schema", '{"$ref": "http://localhost/x"}', "is not a valid json_schema"),
    ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, "recursion limit exceeded"),
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


def test_a_guide_is_compiled_once_and_the_last_ones_are_kept(compiler, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_CACHED_GUIDES", 3)
    specs = [GuideSpec("regex", f"a{{{i + 1}}}") for i in range(4)]
    assert compiler.find(specs[0]) is None
    guides = [compiler.compile(spec) for spec in specs[:3]]
    assert [compiler.compile(spec) for spec in specs[:3]] == guides
    assert compiler.find(specs[0]) is guides[0]
    compiler.compile(specs[3])
    assert [compiler.find(spec) is None for spec in specs] == [False, True, False, False], (
        "the one not used longest goes"
    )


def test_what_takes_too_long_ends_alone(tokenizer):
    compiler = GuideCompiler(tokenizer, tokenizer.vocab_size, timeout_s=1.0)
    try:
        compiler.compile(GuideSpec("regex", "a+"))
        with pytest.raises(InvalidArgumentError, match="takes more than 1 s or 2 GiB to compile; simplify it"):
            compiler.compile(GuideSpec("json_schema", SLOW))
        compiler.compile(GuideSpec("regex", "b+"))
    finally:
        compiler.close()


def test_many_threads_get_one_guide(compiler):
    spec, guides = GuideSpec("regex", "(many|threads)+"), []
    threads = [threading.Thread(target=lambda: guides.append(compiler.compile(spec))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(guides) == 8
    assert len(set(map(id, guides))) == 1
