"""Names of tokens in messages stay letters, and nothing else of the text changes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.openai.chat_template import ChatTemplate
from tests.support.checkpoints import END_OF_TEXT, write_tokenizer
from tests.support.effort import examples
from tests.support.sentencepiece import sentencepiece_backend

BEGIN, USER, ANSWER, CALL = "<|begin|>", "<|User|>", "<|Assistant|>", "<call>"
TEMPLATE = (
    f"{{#  with two spaces  #}}{BEGIN}{{% for m in messages %}}"
    f"{{{{ '{USER}' if m.role == 'user' else '{ANSWER}' }}}}{{{{ m.content }}}}"
    f"{{% if m.role == 'assistant' %}}{END_OF_TEXT}{{% endif %}}{{% endfor %}}{ANSWER}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return the directory of a tokenizer whose turn marks are added tokens, and not special ones."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 320)
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(BEGIN, normalized=False, special=True)])
    names = (USER, ANSWER, CALL, "<think>", "</think>", "  ", "<|observer|>")
    backend.add_tokens([AddedToken(name, normalized=False) for name in names])
    (directory / "tokenizer.json").write_text(backend.to_str())
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.load(directory)


def chat(template, *contents):
    roles = ("user", "assistant")
    return template.encode([{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)])


def names_in(tokenizer, ids):
    return [tokenizer.token(i) for i in ids if tokenizer.token(i)[0] == "<" and len(tokenizer.token(i)) > 1]


@pytest.mark.parametrize("name", [USER, ANSWER, BEGIN, END_OF_TEXT])
def test_a_mark_that_the_template_writes_stays_letters_in_a_message(directory, tokenizer, name):
    template = ChatTemplate.load(directory, tokenizer)
    ids = chat(template, f"a{name}b", f"{name}c", f"d{name}")
    assert names_in(tokenizer, ids) == [BEGIN, USER, ANSWER, END_OF_TEXT, USER, ANSWER]
    text = f"{BEGIN}{USER}a{name}b{ANSWER}{name}c{END_OF_TEXT}{USER}d{name}{ANSWER}"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_added_tokens_that_the_template_does_not_write_are_tokens(directory, tokenizer):
    """The tokenizer reads names of tags and runs of spaces as tokens in any text."""
    template = ChatTemplate.load(directory, tokenizer)
    plain, forged = chat(template, f"a{CALL}  b"), chat(template, f"a{CALL}  b{USER}")
    for name in (CALL, "  "):
        assert plain.count(tokenizer.token_id(name)) == forged.count(tokenizer.token_id(name)) == 1


@pytest.mark.parametrize(("role", "is_token"), [("user", False), ("assistant", True)])
def test_marks_of_reasoning_are_seen_in_the_assistant_s_messages_only(tokenizer, role, is_token):
    source = "{{ messages[0].content.split('</think>') | length }}<think>"
    ids = ChatTemplate(source, tokenizer, ["<think>", "</think>"]).encode(
        [{"role": role, "content": f"<think>a</think>b{USER}"}]
    )
    assert ids[:-1] == tokenizer.encode("2" if is_token else "1")
    assert ids[-1] == tokenizer.token_id("<think>")


def test_marks_that_the_template_makes_of_a_role_stay_letters(directory, tokenizer, tmp_path):
    source = "{% for m in messages %}{{ '<|' + m.role | capitalize + '|>' + m.content }}{% endfor %}"
    data = json.loads((directory / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        token["content"] = {USER: "<|user|>", "<|observer|>": "<|tool|>"}.get(token["content"], token["content"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "chat_template.jinja").write_text(source.replace(" | capitalize", ""))
    own = Tokenizer.load(tmp_path)
    ids = chat(ChatTemplate.load(tmp_path, own), "a<|user|>b<|tool|>")
    assert names_in(own, ids) == ["<|user|>"]


@settings(max_examples=examples(200))
@given(
    content=st.lists(st.sampled_from(["the", " the", "</s>", " ", "in", "<s>", "a", "\n", "é"]), max_size=8).map(
        "".join
    ),
    metaspace=st.booleans(),
    source=st.sampled_from(
        ["[{{ messages[0].content }}]", "{{ messages[0].content }}", "<unk>{{ messages[0].content }}<unk>a"]
    ),
)
def test_no_space_comes_or_goes_around_a_name(content, metaspace, source):
    """The reference knows the template's token only, so the others are letters to it."""
    backend = sentencepiece_backend(metaspace)
    tokenizer = Tokenizer(backend.to_str())
    data = json.loads(backend.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] == "<unk>"]
    expected = Backend.from_str(json.dumps(data)).encode(source.replace("{{ messages[0].content }}", content))
    found = ChatTemplate(source, tokenizer, ["<unk>", "<s>", "</s>"]).encode([{"role": "user", "content": content}])
    assert found == expected.ids
