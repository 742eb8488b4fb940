"""Tokenizers out of GGUF metadata: the same ids and texts as the tokenizer.json that the file was made of."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.gguf.tokenizer import gguf_tokenizer
from faser_trtllm.models.tokenizer import Tokenizer as OurTokenizer
from tests.models.gguf.opened import opened
from tests.support.checkpoints import make_checkpoint
from tests.support.effort import examples
from tests.support.gguf_writer import ARRAY, I32, STRING, TYPE_BF16, U32, gguf_bytes, gguf_of, write_gguf

TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(
            [
                "the",
                " the",
                "1234",
                " 56 ",
                "it's",
                "I'LL",
                "\n\n",
                "\r\n ",
                "  ",
                "ß",
                "東京",
                "🙂",
                "e\u0301",
                ".",
                "theThe",
                ".\n/",
            ]
        ),
        max_size=12,
    ).map("".join),
)


def python_metadata(metadata: dict[str, tuple[int, Any]]) -> dict[str, Any]:
    """Return the metadata as the file reader does."""
    values: dict[str, Any] = {}
    for key, (_, value) in metadata.items():
        if isinstance(value, tuple):
            element, items = value
            value = items if element == STRING else np.array(items)
        values[key] = value
    return values


def from_metadata(metadata: dict[str, Any]) -> OurTokenizer:
    found = gguf_tokenizer(metadata, "x.gguf")
    return OurTokenizer(found.files["tokenizer.json"].decode(), found.bos_token_id, found.eos_token_ids)


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_file_has_the_tokenizer_of_its_folder(tmp_path: Path, add_bos: bool) -> None:
    folder = make_checkpoint(tmp_path / "folder", add_bos=add_bos)
    file = write_gguf(tmp_path / "x.gguf", folder, TYPE_BF16)
    theirs = OurTokenizer.load(folder)
    with opened(file) as opened_file:
        ours = opened_file.checkpoint.tokenizer
    assert ours.first_difference(theirs) is None
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, theirs.eos_token_ids) == (1, (0,))
    for text in ("The quick brown fox's 1234 jumps\n\n  over<|endoftext|>", "Zwölf 東京 🙂", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, parse_special_tokens=True) == theirs.encode(text, parse_special_tokens=True)
        assert ours.decode(ours.encode(text)) == text


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_checkpoint(tmp_path_factory.mktemp("t") / "folder", vocab_size=330)
    metadata = python_metadata(gguf_of(folder, TYPE_BF16)[0])
    # What only some of the families keep together.
    extra = {"12": "1 2", "123": "12 3", "1234": "123 4", "\u010a\u010a": "\u010a \u010a", "\u01201": "\u0120 1"}
    extra |= {"eT": "e T", "t'": "t '", "\u010a/": "\u010a /"}
    types = [*metadata["tokenizer.ggml.token_type"], *[1] * len(extra)]
    return metadata | {
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], *extra],
        "tokenizer.ggml.merges": [*metadata["tokenizer.ggml.merges"], *extra.values()],
        "tokenizer.ggml.token_type": np.array(types),
    }


# As in the tokenizer.json of Llama 3, Qwen2 and gpt-oss.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_tokenizer(metadata: dict[str, Any], regex: str) -> Tokenizer:
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    split = pre_tokenizers.Split(Regex(regex), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("pre", ["gpt-2", "gpt-4o", "llama-bpe", "qwen2", "olmo", "smollm"])
@settings(max_examples=examples(100))
@given(text=TEXTS)
def test_texts_are_split_as_the_families_do(base: dict[str, Any], pre: str, text: str) -> None:
    ours = from_metadata(base | {"tokenizer.ggml.pre": pre})
    theirs = split_tokenizer(base, {"gpt-4o": GPT_OSS, "qwen2": QWEN2}.get(pre, LLAMA3))
    if pre in ("gpt-2", "olmo", "smollm"):
        steps = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        theirs.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False)])
    if pre in ("qwen2", "olmo"):
        theirs.normalizer = normalizers.NFC()
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids


def test_llama3_starts_with_bos_unless_the_file_says_otherwise(base: dict[str, Any]) -> None:
    given = {key: value for key, value in base.items() if key != "tokenizer.ggml.add_bos_token"}
    llama3 = given | {"tokenizer.ggml.pre": "llama-bpe"}
    assert from_metadata(llama3).encode("a")[0] == 1
    assert from_metadata(llama3 | {"tokenizer.ggml.add_bos_token": False}).encode("a")[0] != 1
    assert from_metadata(given).encode("a")[0] != 1


PIECES = [
    "\u2581",
    *"abcdehinrst.,",
    "\u2581t",
    "he",
    "\u2581the",
    "er",
    "\u2581\u2581",
    "in",
    "re",
    "here",
    "the",
    "st",
    "ers",
]


def sentencepiece_metadata(scores: list[float] | None = None) -> dict[str, Any]:
    """Bytes and a few pieces, the earlier the better, as in Llama 2."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(PIECES), np.int32),
        "tokenizer.ggml.scores": np.array(
            [0.0] * 259 + (scores or [-float(i) for i in range(len(PIECES))]), np.float32
        ),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule: join the neighbors whose union scores best while there are any."""
    parts = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        known = [
            (-scores[left + right], i)
            for i, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in scores
        ]
        if not known:
            return parts
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(max_examples=examples(200))
@given(
    text=st.lists(st.sampled_from([*"abinrst., ", "é", "\n", "the", " the", "here", "ers", "  "]), max_size=12).map(
        "".join
    ),
    order=st.permutations(range(len(PIECES))),
)
def test_sentencepiece_joins_the_best_neighbors(text: str, order: list[int]) -> None:
    metadata = sentencepiece_metadata([-float(rank) for rank in order])
    tokenizer = from_metadata(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    expected = [1]
    for part in merged(text, dict(zip(PIECES, (-float(rank) for rank in order), strict=True))):
        bytes_of = [f"<0x{value:02X}>" for value in part.encode()]
        expected += [tokens.index(part)] if part in PIECES else [tokens.index(name) for name in bytes_of]
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_without_a_space_in_front() -> None:
    tokenizer = from_metadata(sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False})
    assert [tokenizer.token(i) for i in tokenizer.encode("the inn")] == ["<s>", "the", "\u2581", "in", "n"]
    assert tokenizer.decode(tokenizer.encode(" the inn")) == " the inn"


def test_ends_template_and_padding_are_taken_over(tmp_path: Path, base: dict[str, Any]) -> None:
    count = len(base["tokenizer.ggml.tokens"])
    padded = base | {
        "tokenizer.ggml.tokens": [*base["tokenizer.ggml.tokens"], "<tool>", f"[PAD{count + 1}]"],
        "tokenizer.ggml.token_type": np.array([*base["tokenizer.ggml.token_type"], 4, 5]),
        "tokenizer.ggml.eot_token_id": count,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    found = gguf_tokenizer(padded, "x.gguf")
    for name, data in found.files.items():
        (tmp_path / name).write_bytes(data)
    assert (found.bos_token_id, found.eos_token_ids) == (1, (0, count))
    tokenizer = OurTokenizer.load(tmp_path)
    assert tokenizer.vocab_size == count + 1
    assert tokenizer.encode("a<tool>", parse_special_tokens=True)[-1] == count
    assert tokenizer.decode([count]) == "<tool>"
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ bos_token }}{{ messages[0].content }}"
    settings_json = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings_json == {"bos_token": "<|begin|>", "eos_token": "<|endoftext|>"}


@pytest.mark.parametrize("kind", [3, 4], ids=["control", "user-defined"])
@pytest.mark.parametrize("key", [None, "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_a_file_ends_texts_where_its_folder_does(tmp_path: Path, kind: int, key: str | None) -> None:
    """At tokens that its keys name, and at those that end texts by their names, which the folder's template writes."""
    folder = make_checkpoint(tmp_path / "folder", vocab_size=324, tokenizer_vocab_size=320)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = ["<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|file_sep|>"]
    backend.add_tokens([AddedToken(token, special=kind == 3, normalized=False) for token in tokens])
    (folder / "tokenizer.json").write_text(backend.to_str())
    (folder / "chat_template.jinja").write_text("".join(tokens))
    metadata, tensors = gguf_of(folder, TYPE_BF16)
    metadata["tokenizer.ggml.tokens"] = (ARRAY, (STRING, metadata["tokenizer.ggml.tokens"][1][1] + tokens))
    metadata["tokenizer.ggml.token_type"] = (ARRAY, (I32, [3, 3] + [1] * 318 + [kind] * 4))
    if key is not None:
        metadata[f"tokenizer.ggml.{key}_token_id"] = (U32, 320)
        (folder / "generation_config.json").write_text('{"eos_token_id": [0, 320]}')
    (tmp_path / "x.gguf").write_bytes(gguf_bytes(metadata, tensors))
    with opened(tmp_path / "x.gguf") as ours, opened(folder) as theirs:
        found = ours.checkpoint.tokenizer.eos_token_ids
        assert found == theirs.checkpoint.tokenizer.eos_token_ids == (0, *([] if key is None else [320]), 321, 323)


@pytest.mark.parametrize("key", ["eos", "eot", "eom", "fim_sep"])
def test_an_end_token_of_a_file_is_one_of_the_model(tmp_path: Path, key: str) -> None:
    metadata, tensors = gguf_of(make_checkpoint(tmp_path / "folder"), TYPE_BF16)
    metadata[f"tokenizer.ggml.{key}_token_id"] = (U32, 320)
    (tmp_path / "x.gguf").write_bytes(gguf_bytes(metadata, tensors))
    sentence = rf"x\.gguf: tokenizer\.ggml\.{key}_token_id is 320, the model's ids are 0 to 319; correct or remove it"
    with pytest.raises(CheckpointError, match=sentence), opened(tmp_path / "x.gguf"):
        pass


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert', only 'gpt2' and 'llama' are read"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is None, .*--tokenizer_dir"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken', known are gpt-2, .*--tokenizer_dir"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing or no list of strings"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "tokenizer.ggml.token_type does not have one number"),
        ({"tokenizer.ggml.tokens": ["a"] * 338}, "tokenizer.ggml.tokens has 'a' as 0 and as 1"),
        ({"tokenizer.ggml.token_type": np.zeros(338, bool)}, "tokenizer.ggml.token_type does not have one number"),
        ({"tokenizer.ggml.merges": ["a"]}, "tokenizer.ggml.merges has 'a', which joins no two tokens"),
        ({"tokenizer.ggml.merges": ["a \u4e00"]}, "which joins no two tokens"),
        ({"tokenizer.ggml.eos_token_id": 4_000_000_000}, "tokenizer.ggml.eos_token_id is 4000000000, there are"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_what_cannot_be_used_is_named(base: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    metadata = {key: value for key, value in (base | changes).items() if value is not None}
    with pytest.raises(CheckpointError, match=sentence) as caught:
        from_metadata(metadata)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_ones_own_replaces_one_that_cannot_be_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "folder")
    metadata, tensors = gguf_of(folder, TYPE_BF16)
    metadata = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
    metadata["tokenizer.ggml.model"] = (STRING, "no_vocab")
    metadata["tokenizer.ggml.eos_token_id"] = (U32, 7)
    file = tmp_path / "x.gguf"
    file.write_bytes(gguf_bytes(metadata, tensors))
    with pytest.raises(CheckpointError, match="--tokenizer_dir"), opened(file):
        pass
    with opened(file, folder) as found:
        assert found.checkpoint.tokenizer.first_difference(OurTokenizer.load(folder)) is None
        assert found.checkpoint.tokenizer.eos_token_ids == (0, 7), "the folder's and the file's"
        assert found.checkpoint.tokenizer_files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    larger = make_checkpoint(tmp_path / "larger", vocab_size=330)
    with (
        pytest.raises(CheckpointError, match=r"tokenizer has 330 tokens; it must have at most vocab_size \(320\)"),
        opened(file, larger),
    ):
        pass


def test_tokens_have_a_length_that_can_be_cut_at_each_place() -> None:
    """A merge joins any two parts of a token, so all of its cuts are looked at."""
    tokens = ["a", "aa", "a" * 1024, "a" * 1025]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens[:3],
        "tokenizer.ggml.scores": np.arange(3, dtype=np.float32),
    }
    assert from_metadata(metadata).vocab_size == 3
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": np.arange(4, dtype=np.float32)}
    with pytest.raises(CheckpointError, match=r"of 1025 characters as 3, at most 1024 are read; give a folder"):
        from_metadata(metadata)
