"""Which tokens a draft with another tokenizer has in common with its target, and the weights by the target's ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.models.vocabulary import MappedVocabulary, VocabularyMap, map_vocabulary
from faser_trtllm.models.weights import Weights, bfloat16_from_float32
from tests.support.effort import examples
from tests.support.sentencepiece import sentencepiece_backend

ROWS = 1000


def tokenizer_of(
    tokens: list[str],
    special: tuple[str, ...] = (),
    kind: str = "bytes",
    bos: str | None = None,
    eos: str | None = None,
) -> Tokenizer:
    """One whose ids are the tokens' places. kind: "bytes" (ByteLevel), or "marks" (SentencePiece's)."""
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    if kind == "bytes":
        backend.decoder = decoders.ByteLevel()
    else:
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    found = Tokenizer(backend.to_str())
    found.bos_token_id = None if bos is None else found.token_id(bos)
    found.end_at([] if eos is None else [found.token_id(eos)], ROWS)
    return found


def mapped(target: Tokenizer, draft: Tokenizer, rows: int = ROWS, draft_rows: int = ROWS) -> dict[str, str]:
    """Spelling in the target -> in the draft."""
    found = map_vocabulary(target, rows, draft, draft_rows)
    assert found is not None
    return {
        str(target.token(one)): str(draft.token(other))
        for one, other in zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True)
    }


def test_tokens_are_the_same_by_their_text() -> None:
    """Whatever stands for a space and for a byte; a byte's own token is not the letter's where there are both."""
    byte_level = tokenizer_of(["a", "Ġthe", "Ċ", "Ã", "é", "Ã©", "only"])
    marked = tokenizer_of(["▁the", "<0x61>", "<0x0A>", "<0xC3>", "é", "a", "own"], kind="marks")
    expected = {"a": "a", "Ġthe": "▁the", "Ċ": "<0x0A>", "Ã": "<0xC3>", "Ã©": "é"}
    assert mapped(byte_level, marked) == expected
    assert mapped(marked, byte_level) == {other: one for one, other in expected.items()}
    both = tokenizer_of(["<0x61>", "a", "b"], kind="marks")
    assert mapped(both, tokenizer_of(["b", "a", "<0x61>"], kind="marks")) == {"<0x61>": "<0x61>", "a": "a", "b": "b"}
    found = map_vocabulary(byte_level, ROWS, marked, ROWS)
    assert found is not None
    assert str(found) == "71.43 % of the target's tokens (5 of 7)"


def test_special_tokens_are_the_same_by_their_text_or_their_role() -> None:
    """A word that is spelled like one is another token."""
    target = tokenizer_of(["a", "<s>"], ("<|end|>", "<|begin|>", "<|pad|>"), bos="<|begin|>", eos="<|end|>")
    draft = tokenizer_of(["a"], ("<s>", "</s>", "<|pad|>"), bos="<s>", eos="</s>")
    assert mapped(target, draft) == {"a": "a", "<|begin|>": "<s>", "<|end|>": "</s>", "<|pad|>": "<|pad|>"}
    # The text goes before the role, and no token stands for two.
    target = tokenizer_of(["a"], ("<eos>", "</s>"), eos="<eos>")
    draft = tokenizer_of(["a"], ("</s>",), eos="</s>")
    assert mapped(target, draft) == {"a": "a", "</s>": "</s>"}


def test_rows_that_a_model_does_not_have_are_left_out() -> None:
    target, draft = tokenizer_of(["a", "b", "c"]), tokenizer_of(["c", "b", "a"])
    assert mapped(target, draft, rows=2) == {"a": "a", "b": "b"}
    assert mapped(target, draft, draft_rows=2) == {"b": "b", "c": "c"}
    found = map_vocabulary(target, 2, draft, ROWS)
    assert found is not None
    assert found.overlap == 1
    assert map_vocabulary(target, ROWS, tokenizer_of(["x"]), ROWS) is None


SPELLINGS = st.lists(
    st.sampled_from(["a", "Ġa", "▁a", "▁", "Ġ", "<0x61>", "<0x20>", "Ċ", "ab", "é", "Ã©"]), unique=True
)


@settings(max_examples=examples(200))
@given(SPELLINGS, SPELLINGS, st.sampled_from(["bytes", "marks"]), st.sampled_from(["bytes", "marks"]))
def test_a_map_never_takes_two_tokens_to_one(target: list[str], draft: list[str], kind: str, other_kind: str) -> None:
    one, other = tokenizer_of(target, kind=kind), tokenizer_of(draft, kind=other_kind)
    found = map_vocabulary(one, ROWS, other, ROWS)  # which checks it
    assert found is None or found.overlap <= 1
    if kind == other_kind:
        common = set(target) & set(draft)
        assert not common or (found is not None and found.overlap > 0)


def test_two_published_kinds_have_most_tokens_in_common() -> None:
    """Bytes for unknown characters, and none: the letters, words and marks are the same."""
    with_bytes, without = (Tokenizer(sentencepiece_backend(metaspace=kind).to_str()) for kind in (False, True))
    pairs = mapped(without, with_bytes)
    assert all(one == other for one, other in pairs.items())
    assert {"▁the", "▁▁", "er", "<unk>"} <= pairs.keys()


@pytest.mark.parametrize(
    ("target_ids", "draft_ids"), [([0, 0], [0, 1]), ([0, 1], [2, 2]), ([1, 0], [0, 1]), ([0, 4], [0, 1]), ([], [])]
)
def test_a_wrong_map_is_refused(target_ids: list[int], draft_ids: list[int]) -> None:
    with pytest.raises(ValueError, match="map"):
        VocabularyMap(4, 4, np.array(target_ids, np.int32), np.array(draft_ids, np.int32), {})


class Given(Weights):
    def __init__(self, **tensors: np.ndarray) -> None:
        self._tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, dtype: type) -> np.ndarray:
        tensor = self._tensors[name]
        return tensor if dtype is np.float32 else bfloat16_from_float32(tensor)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_weights_go_by_the_targets_ids(is_tied: bool, dtype: type) -> None:
    """A token that the draft lacks is fed as the mean of the longest tokens that its text begins with."""
    target = tokenizer_of(["ab", "c", "Ġabc", "zz", "a", "abca"])
    draft = tokenizer_of(["c", "own", "a", "ab", "Ġ", "b"])
    found = map_vocabulary(target, 8, draft, 6)
    assert found is not None
    embedding = np.arange(12, dtype=np.float32).reshape(6, 2)
    head = embedding if is_tied else embedding + 100
    own = Given(model__embed_tokens__weight=embedding, lm_head__weight=head, model__norm__weight=np.ones(2, np.float32))
    weights = MappedVocabulary(own, found, is_tied)
    rows = [embedding[3], embedding[0], embedding[[4, 3, 0]].mean(0), [0, 0], embedding[2]]
    rows += [embedding[[3, 0, 2]].mean(0), [0, 0], [0, 0]]
    read = weights.bfloat16 if dtype is np.uint16 else weights.float32
    wanted = np.array(rows, np.float32)
    assert np.array_equal(
        read("model.embed_tokens.weight", (8, 2)), wanted if dtype is np.float32 else bfloat16_from_float32(wanted)
    )
    wanted = head[[3, 0, 2]]
    assert found.target_ids.tolist() == [0, 1, 4]
    assert np.array_equal(
        read("lm_head.weight", (3, 2)), wanted if dtype is np.float32 else bfloat16_from_float32(wanted)
    )
    assert read("model.norm.weight", (2,)).size == 2


def test_a_long_token_is_cut_from_the_left() -> None:
    found = map_vocabulary(tokenizer_of(["?" + "x" * 99_999, "a"]), ROWS, tokenizer_of(["a", "xx"]), ROWS)
    assert found is not None
    assert found.pieces[0] == (1,) * 49_999  # neither the mark nor one letter alone is a token
