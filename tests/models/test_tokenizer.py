from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.support.checkpoints import make_checkpoint, write_tokenizer
from tests.support.effort import examples
from tests.support.sentencepiece import sentencepiece_backend

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=40)


def byte_level_backend(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 320)
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.add_tokens(["«end» \uff5c", "two words"])  # not in the byte alphabet
    return backend


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "metaspace", "wordpiece", "none"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    if request.param == "byte_level":
        return byte_level_backend(tmp_path_factory)
    backend = sentencepiece_backend(metaspace=request.param == "metaspace")
    if request.param in ("wordpiece", "none"):
        backend.decoder = decoders.WordPiece() if request.param == "wordpiece" else None
    return backend


def pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    chunks = [ids[a:b] for a, b in itertools.pairwise(bounds)]
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


CUTS = st.lists(st.integers(0, 1000), max_size=30)


@settings(max_examples=examples(80))
@given(data=st.data(), cuts=CUTS, skip=st.booleans())
def test_pieces_add_up_to_the_whole(backend: Backend, data: st.DataObject, cuts: list[int], skip: bool) -> None:
    tokenizer = Tokenizer(backend.to_str())
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 3), max_size=30))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, ids, cuts, skip)) == whole
    assert "".join(pieces(tokenizer, ids, list(range(len(ids))), skip)) == whole
    fallback = "ByteFallback" in backend.to_str()
    if not fallback or "\ufffd" not in whole + backend.decode(ids):
        assert whole == backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=examples(80))
@given(data=st.data(), cuts=CUTS)
def test_text_after_a_prompt_continues_it(backend: Backend, data: st.DataObject, cuts: list[int]) -> None:
    """Where the prompt ends with a whole character, as text does."""
    tokenizer = Tokenizer(backend.to_str())
    prompt = tokenizer.encode(data.draw(TEXTS), add_special_tokens=False)
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 3), max_size=30))
    whole = tokenizer.decode(prompt + ids)
    begin = tokenizer.decode(prompt)
    detokenizer = IncrementalDetokenizer(tokenizer, before=prompt)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    text = "".join(detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(bounds)) + detokenizer.finish()
    assert begin + text == whole


@pytest.mark.parametrize("metaspace", [False, True])
def test_the_space_behind_a_prompt_is_kept(metaspace: bool) -> None:
    tokenizer = Tokenizer(sentencepiece_backend(metaspace).to_str())
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert IncrementalDetokenizer(tokenizer, before=ids).push(ids) == " the"
    assert IncrementalDetokenizer(tokenizer, before=[1]).push(ids) == "the", "<s> has no text"
    assert IncrementalDetokenizer(tokenizer).push(ids) == "the"


@settings(max_examples=examples(80))
@given(text=TEXTS, cuts=CUTS)
def test_text_comes_back(backend: Backend, text: str, cuts: list[int]) -> None:
    tokenizer = Tokenizer(backend.to_str())
    ids = tokenizer.encode(text, add_special_tokens=False)
    streamed = "".join(pieces(tokenizer, ids, cuts))
    assert streamed == backend.decode(ids)
    if "ByteLevel" in backend.to_str():
        assert streamed == text


def test_unfinished_characters_are_held_back(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 258)
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("a🙂b")
    assert len(ids) == 6
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == ["a", "", "", "", "🙂", "b"]
    assert detokenizer.push(ids[1:3]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_invalid_bytes_do_not_hold_back_for_ever(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 258)
    tokenizer = Tokenizer.load(tmp_path)
    lone = tokenizer.encode("🙂")[-1]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push([lone] * 1000) == "\ufffd" * 1000


def test_a_push_costs_the_same_early_and_late(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(sentencepiece_backend(metaspace=False).to_str())
    decoded: list[int] = []
    original = IncrementalDetokenizer._backend_text

    def counting(self: IncrementalDetokenizer, ids: list[int]) -> str:
        decoded.append(len(ids))
        return original(self, ids)

    monkeypatch.setattr(IncrementalDetokenizer, "_backend_text", counting)
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in tokenizer.encode("the heron in the inn ß ") * 100:
        detokenizer.push([token_id])
    assert len(decoded) > 1000
    assert max(decoded) <= 5


def test_typed_special_tokens_are_plain_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_checkpoint(tmp_path, add_bos=True))
    text = "a<|endoftext|>b"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 1
    assert 0 not in ids
    assert tokenizer.decode(ids) == text
    parsed = tokenizer.encode(text, parse_special_tokens=True, add_special_tokens=False)
    assert len(parsed) == 3
    assert parsed[1] == 0
    assert tokenizer.decode(parsed) == "ab"
    assert tokenizer.decode(parsed, skip_special_tokens=False) == text
    assert tokenizer.encode(text) == ids


def test_other_threads_run_while_a_long_text_is_tokenized(tmp_path: Path) -> None:
    """Else every long prompt would stop the executor, and so all clients' tokens."""
    write_tokenizer(tmp_path, 320)
    tokenizer = Tokenizer.load(tmp_path)
    counted, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    rates = []
    for call in (lambda: time.sleep(0.3), lambda: tokenizer.encode("def sort(items): return items\n" * 40_000)):
        before, started_s = counted[0], time.monotonic()
        call()
        rates.append((counted[0] - before) / (time.monotonic() - started_s))
    done.set()
    thread.join()
    alone, meanwhile = rates
    assert meanwhile > 0.1 * alone


def test_all_sources_of_end_tokens_count(tmp_path: Path) -> None:
    """<|endoftext|>, which is 0, is the tokenizer's own eos_token, and one by its name, too."""
    directory = make_checkpoint(tmp_path, eos_token_id=7)
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6], "bos_token_id": 2}')
    assert (Tokenizer.load(directory).eos_token_ids, Tokenizer.load(directory).bos_token_id) == ((0, 5, 6, 7), 2)
    assert Tokenizer.load(directory, stated=(9, 5)).eos_token_ids == (0, 5, 6, 7, 9)
    (directory / "generation_config.json").unlink()
    assert (Tokenizer.load(directory).eos_token_ids, Tokenizer.load(directory).bos_token_id) == ((0, 7), 1)
    (directory / "config.json").unlink()
    assert (Tokenizer.load(directory).eos_token_ids, Tokenizer.load(directory).bos_token_id) == ((0,), 1)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"tokenizer_config.json": {"eos_token": "«stop»"}}, (319,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "«stop»", "special": True}}}, (319,)),
        ({"special_tokens_map.json": {"eos_token": "«stop»"}}, (319,)),
        ({"special_tokens_map.json": {"eos_token": {"content": "«stop»"}}}, (319,)),
        ({"tokenizer_config.json": {"eos_token": None}, "special_tokens_map.json": {"eos_token": "«stop»"}}, (319,)),
        (
            {"tokenizer_config.json": {"eos_token": "<new>", "added_tokens_decoder": {"318": {"content": "<new>"}}}},
            (318,),
        ),
        ({"tokenizer_config.json": {"eos_token": "<new>", "added_tokens_decoder": {"-1": {"content": "<new>"}}}}, ()),
        ({"tokenizer_config.json": {"eos_token": "no token of it"}}, ()),
    ],
)
def test_the_tokenizers_own_end_token(tmp_path: Path, files: dict[str, Any], found: tuple[int, ...]) -> None:
    write_tokenizer(tmp_path, 319)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["«stop»"])
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    (tmp_path / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).eos_token_ids == found


@pytest.mark.parametrize(
    ("added", "ends"),
    [
        (["<|im_start|>", "<|im_end|>"], ["<|im_end|>"]),
        (["<|start_header_id|>", "<|eot_id|>", "<|eom_id|>"], ["<|eot_id|>", "<|eom_id|>"]),
        (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"], ["<|fim_pad|>"]),
        (["<|file_sep|>", "<|repo_name|>", "<tool_call>", "</think>"], ["<|file_sep|>", "<|repo_name|>"]),
        (["<|end|>", "<|return|>"], ["<|end|>", "<|return|>"]),
        (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"]),
        (["<|end|>", "<|calls|>", "<|flush|>"], ["<|calls|>", "<|flush|>"]),
        (["</s>", "<|tool_response>"], ["<|tool_response>"]),
    ],
)
@pytest.mark.parametrize("is_special", [True, False])
def test_added_tokens_that_are_known_to_end_texts(
    tmp_path: Path, added: list[str], ends: list[str], is_special: bool
) -> None:
    directory = make_checkpoint(tmp_path)
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.add_tokens([AddedToken(token, special=is_special, normalized=False) for token in added])
    (directory / "tokenizer.json").write_text(backend.to_str())
    assert Tokenizer.load(directory).eos_token_ids == (0,), "no template writes them"
    (directory / "chat_template.jinja").write_text("".join(added))
    assert Tokenizer.load(directory).eos_token_ids == (0, *map(backend.token_to_id, ends))
    (directory / "chat_template.jinja").unlink()
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "".join(added)}))
    assert Tokenizer.load(directory).eos_token_ids == (0, *map(backend.token_to_id, ends))


def test_a_piece_of_text_that_is_spelled_like_an_end_token_is_none(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    data = json.loads((directory / "tokenizer.json").read_text())
    data["model"]["vocab"]["</s>"] = 320
    (directory / "tokenizer.json").write_text(json.dumps(data))
    assert Tokenizer.load(directory).token_id("</s>") == 320
    assert Tokenizer.load(directory).eos_token_ids == (0,)


def test_end_tokens_without_a_row_of_the_model_are_left_out(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(["<|im_end|>"])
    (directory / "tokenizer.json").write_text(backend.to_str())
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    tokenizer = Tokenizer.load(directory, vocab_size=320)
    assert (tokenizer.eos_token_ids, tokenizer.unreachable_end_ids) == ((0,), (320,))
    tokenizer = Tokenizer.load(directory, vocab_size=321)
    assert (tokenizer.eos_token_ids, tokenizer.unreachable_end_ids) == ((0, 320), ())


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        (320, "is 320, the model's ids are 0 to 319; correct or remove it"),
        ([0, 10**12], "is 1000000000000, the model's ids are 0 to 319"),
        (-1, "is -1; it must be a token id"),
        ([2, True], r"is \[2, True\]; it must be a token id"),
        (2.0, r"is 2\.0; it must be a token id"),
        ("2", "is '2'; it must be a token id"),
        ({"a": 2}, "is {'a': 2}; it must be a token id"),
    ],
)
def test_configurations_name_end_tokens_of_the_model(tmp_path: Path, file: str, ids: object, sentence: str) -> None:
    directory = make_checkpoint(tmp_path)
    (directory / file).write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(CheckpointError, match=f"{file} in .*: eos_token_id {sentence}"):
        Tokenizer.load(directory, vocab_size=320)


def test_truncation_and_padding_of_training_are_off(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 320)
    plain = Tokenizer.load(tmp_path).encode("the dog " * 20)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(8)
    backend.enable_padding(length=512)
    assert Tokenizer(backend.to_str()).encode("the dog " * 20) == plain


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 320)
    one = Tokenizer.load(tmp_path)
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    token = next(token for token, i in definition["model"]["vocab"].items() if i == 100)
    swapped = {token: 101, one.token(101): 100}
    definition["model"]["vocab"] |= swapped
    other = Tokenizer(json.dumps(definition))
    assert one.first_difference(one) is None
    assert one.fingerprint() == Tokenizer.load(tmp_path).fingerprint() != other.fingerprint()
    expected = f"id 100 is {token!r} in the target and {one.token(101)!r} in the draft"
    assert one.first_difference(other, ("the target", "the draft")) == expected
    write_tokenizer(tmp_path, 300)
    smaller = Tokenizer.load(tmp_path)
    assert one.first_difference(smaller) == f"id 300 is {one.token(300)!r} in one and no token in the other"


def test_unusable_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing in"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be used"):
        Tokenizer.load(tmp_path)


def test_token_ids_have_a_limit(tmp_path: Path) -> None:
    """The tokenizers library visits all ids up to the largest when it writes a tokenizer."""
    write_tokenizer(tmp_path, 300)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["model"]["vocab"]["!"] = 2**31
    with pytest.raises(CheckpointError, match="it has token id 2147483648, at most 2097151 are read"):
        Tokenizer(json.dumps(data))
    with pytest.raises(CheckpointError, match="cannot be used: it has no model"):
        Tokenizer('{"model": []}')


def test_a_text_that_the_vocabulary_cannot_say() -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    tokenizer = Tokenizer(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot encode this text: WordLevel error"):
        tokenizer.encode("b")


def test_a_panic_of_the_library_is_an_error_of_ours() -> None:
    data = json.loads(sentencepiece_backend(metaspace=False).to_str())
    data["decoder"]["decoders"][-1]["stop"] = 118
    tokenizer = Tokenizer(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot decode these tokens: "):
        tokenizer.decode([tokenizer.token_id("▁▁"), tokenizer.token_id("▁")])


def test_half_a_surrogate_pair_is_no_token(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "\ud800"}))
    assert Tokenizer.load(tmp_path).eos_token_ids == ()
