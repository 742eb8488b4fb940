"""Grammars of llguidance over a real tokenizer: what the masks allow is what the grammar says, and nothing else."""

import itertools
import json
import re

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faser_trtllm.core.guide import GuideError
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.guided.grammar import Grammar, compile_source, open_tokenizer, source_of
from faser_trtllm.guided.spec import GuideSpec
from faser_trtllm.models.tokenizer import Tokenizer
from tests.support.effort import examples
from tests.support.scripted_model import byte_chars
from tests.support.triton_server import ROOT

MODEL_VOCAB = 4103  # more than the tokenizer has, and no multiple of 32
END = 5  # a token of text that a request names as its end


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(ROOT / "engines" / "demo" / "target")


@pytest.fixture(scope="module")
def compiled(tokenizer):
    opened = open_tokenizer(tokenizer.definition, MODEL_VOCAB, tokenizer.eos_token_ids)

    def compile_guide(guide_type, guide=""):
        matcher, error = compile_source(opened, source_of(GuideSpec(guide_type, guide)))
        assert error == ""
        return Grammar(matcher, opened.eos_tokens)

    return compile_guide


def allowed(state):
    mask = np.full(-(-MODEL_VOCAB // 32), 0xDEADBEEF, np.uint32)
    state.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:MODEL_VOCAB]).tolist()


def random_output(grammar, end_ids, seed, max_tokens=200):
    """A random walk along the masks to an end; None if it does not end in time."""
    state, rng, output = grammar.start(end_ids), np.random.default_rng(seed), []
    while len(output) < max_tokens:
        choices = set(allowed(state))
        assert choices & set(end_ids) == (set(end_ids) if state.is_complete else set())
        choices -= set(end_ids)
        assert choices or state.is_complete, "neither a token nor an end is allowed"
        if state.is_complete and (not choices or rng.random() < 0.3):
            return output
        token = int(rng.choice(sorted(choices)))
        state.advance([token])
        output.append(token)
    return None


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["a", "b"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 2**32))
def test_outputs_follow_their_schema(tokenizer, compiled, seed):
    output = random_output(compiled("json_schema", json.dumps(SCHEMA)), (), seed)
    value = json.loads(tokenizer.decode(output))
    assert set(value) <= set(SCHEMA["properties"])
    assert set(SCHEMA["required"]) <= set(value)
    assert len(value["name"]) <= 8
    assert value["kind"] in ("a", "b")
    assert all(0 <= size <= 99 for size in value.get("sizes", []))
    assert len(value.get("sizes", [])) <= 3


# What \s is in a guide, as Unicode has it; Python's is U+001C to U+001F, too.
WHITE_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 2**32))
@example(seed=1535)  # with a U+001D
def test_outputs_match_their_regex(tokenizer, compiled, seed):
    pattern = r"(ab?c|x[0-9]{2,4})(, [^\s,]{1,5})*"
    output = random_output(compiled("regex", pattern), tokenizer.eos_token_ids, seed)
    if output is not None:
        assert re.fullmatch(pattern.replace(r"\s", WHITE_SPACE), tokenizer.decode(output))


@pytest.mark.parametrize("grammar", ['root ::= "(" root ")" | "x"', 'start: "(" start ")" | "x"'])
def test_outputs_follow_their_grammar(tokenizer, compiled, grammar):
    """Written as for xgrammar or llama.cpp, or in Lark's form."""
    guide = compiled("ebnf_grammar", grammar)
    texts = {tokenizer.decode(o) for o in (random_output(guide, (), s, 60) for s in range(8)) if o is not None}
    assert texts
    for text in texts:
        depth = text.count("(")
        assert text == "(" * depth + "x" + ")" * depth


def test_a_vocabulary_of_much_punctuation_is_followed():
    """Real ones have tokens such as `", "`; with white space that may be empty there were too many readings."""
    chars = byte_chars()
    texts = ["".join(text) for n in range(2, 7) for text in itertools.product('", :}', repeat=n)]
    vocab = {chars[byte]: byte for byte in range(256)}
    vocab |= {"".join(chars[byte] for byte in text.encode()): 256 + i for i, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    opened = open_tokenizer(backend.to_str(), len(vocab), [0])
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5)}, "required": ["p0"]}
    matcher, error = compile_source(opened, source_of(GuideSpec("json_schema", json.dumps(schema))))
    assert error == ""
    state, mask = Grammar(matcher, opened.eos_tokens).start([0]), np.zeros(-(-len(vocab) // 32), np.uint32)
    for byte in b'{"p0": "x y", "p1": "z"}':
        state.fill(mask)
        assert mask[byte // 32] >> byte % 32 & 1
        state.advance([byte])


def test_white_space_in_json_is_bounded(tokenizer, compiled):
    """Without a bound a small model may write white space for ever."""
    (space,) = tokenizer.encode(" ", add_special_tokens=False)
    (brace,) = tokenizer.encode("{", add_special_tokens=False)
    for kind in (("json",), ("json_schema", json.dumps({"type": "object"}))):
        state = compiled(*kind).start(())
        state.advance([brace])
        for _ in range(32):
            assert space in allowed(state)
            state.advance([space])
        assert space not in allowed(state)
        assert '"' in {tokenizer.token(token)[0] for token in allowed(state)}
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    rigid = compiled("json_schema", json.dumps(schema)).start(())
    rigid.advance([brace])
    assert space not in allowed(rigid)


def test_any_json_is_an_object_or_an_array(tokenizer, compiled):
    firsts = {tokenizer.token(token)[0] for token in allowed(compiled("json").start(()))}
    assert firsts <= set("{[ĠĊĉč")
    assert {"{", "["} <= firsts


def test_only_the_request_s_end_ids_end_it_and_only_where_the_grammar_does(tokenizer, compiled):
    guide = compiled("regex", "[a-z]+")
    (eos,) = tokenizer.eos_token_ids
    letters = tokenizer.encode("abc", add_special_tokens=False)
    for end_ids in [(), (eos,), (END,), (eos, END)]:
        state = guide.start(end_ids)
        assert not {eos, END} & set(allowed(state))
        state.advance(letters)
        assert {eos, END} & set(allowed(state)) == set(end_ids)
    comma = tokenizer.encode("b", add_special_tokens=False)[0]
    assert comma in allowed(guide.start(()))
    assert comma not in allowed(guide.start((comma,))), "a token that ends the output is no text of the grammar"


def test_padded_ids_and_special_tokens_are_never_allowed(tokenizer, compiled):
    everything = set(allowed(compiled("regex", r"(.|\n)*").start(())))
    assert not everything & (set(range(tokenizer.vocab_size, MODEL_VOCAB)) | set(tokenizer.eos_token_ids))
    assert len(everything) > 4000


@settings(max_examples=examples(30))
@given(seed=st.integers(0, 2**32), data=st.data())
def test_rolling_back_is_as_if_the_tokens_had_never_been(tokenizer, compiled, seed, data):
    guide = compiled("json_schema", json.dumps(SCHEMA))
    output = random_output(guide, (), seed)
    state, length = guide.start(()), 0
    for _ in range(6):
        length_after = data.draw(st.integers(0, len(output)))
        if length_after < length:
            state.rollback(length - length_after)
        else:
            state.advance(output[length:length_after])
        length = length_after
        fresh = guide.start(())
        fresh.advance(output[:length])
        assert allowed(state) == allowed(fresh)


def test_a_token_that_is_not_allowed_is_an_error_that_stays(tokenizer, compiled):
    state = compiled("regex", "abc").start(())
    with pytest.raises(GuideError, match="guided_decoding_guide cannot be followed further"):
        state.advance(tokenizer.encode("xyz", add_special_tokens=False))
    state.rollback(1)
    with pytest.raises(GuideError):
        allowed(state)


def test_a_grammar_without_any_text_is_an_error(compiled):
    with pytest.raises(GuideError, match="no continuation is allowed"):
        allowed(compiled("json_schema", '{"$ref": "#"}').start(()))


def test_a_regex_that_explodes_is_an_error_and_not_a_wait(compiled):
    state, rng = compiled("regex", "(((a{1000}){1000}){1000}){1000}").start(()), np.random.default_rng(0)

    def walk():
        for _ in range(100):
            state.advance([int(rng.choice(allowed(state)[-3:]))])

    with pytest.raises(GuideError, match="simplify it"):
        walk()


def test_without_the_package_a_sentence_says_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(InvalidArgumentError, match=re.escape("run pip install -c constraints.txt -e '.[guided]'")):
        open_tokenizer(tokenizer.definition, MODEL_VOCAB, ())
