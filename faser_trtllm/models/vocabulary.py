"""Map a draft model's vocabulary to its target's, so that both use the same ids.

Models of one family share a tokenizer and pad their embeddings differently (Qwen2.5: 151,936 and 152,064).
Padding rows carry no meaning, so a draft can take its target's vocab_size. A draft of another family keeps the tokens
that its tokenizer has in common with the target's (TLI, token-level intersection, arXiv 2502.05202).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.fp8 import Fp8Matrix
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.models.weights import Dtype, Weights, converted, float32_from_bfloat16

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MAX_PIECE_BYTES = 64  # longest text that is looked up
_Key = tuple[bool, bytes, int]


class _OtherVocabulary(Weights):
    """Weights whose embedding and LM head subclasses change, so fp8_matrix() returns None for them."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        return self._weights.read(name, dtype)

    def fp8_matrix(self, name: str) -> Fp8Matrix | None:
        return None if name in (_EMBEDDING, _HEAD) else self._weights.fp8_matrix(name)

    def input_scale(self, module: str) -> float | None:
        return self._weights.input_scale(module)


class ResizedVocabulary(_OtherVocabulary):
    """Weights with a resized embedding and head.

    Rows are cut off at the end, or added as copies of the last one: a copied padding row is as unlikely as padding,
    whereas a row of zeros has logit 0 and may win.
    """

    def __init__(self, weights: Weights, vocab_size: int) -> None:
        super().__init__(weights)
        self._vocab_size = vocab_size

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        return (self._vocab_size, *shape[1:]) if name in (_EMBEDDING, _HEAD) else shape

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        tensor = super().read(name, dtype)
        if name not in (_EMBEDDING, _HEAD):
            return tensor
        return tensor[np.minimum(np.arange(self._vocab_size), len(tensor) - 1)]


def resize_vocabulary(config: ModelConfig, vocab_size: int) -> ModelConfig:
    return dataclasses.replace(config, vocab_size=vocab_size)


@dataclasses.dataclass(frozen=True, slots=True)
class VocabularyMap:
    """The tokens that a target and its draft have in common. ValueError unless it maps tokens one to one.

    vocab_size: rows of the target. num_tokens: rows that are tokens of its tokenizer.
    target_ids, draft_ids: int32 [common], the ids of each common token; target_ids ascend.
    pieces: the draft's tokens that spell a token which only the target has; the draft reads their mean embedding.
    """

    vocab_size: int
    num_tokens: int
    target_ids: npt.NDArray[np.int32]
    draft_ids: npt.NDArray[np.int32]
    pieces: Mapping[int, tuple[int, ...]]

    def __post_init__(self) -> None:
        ids = self.target_ids
        if len(ids) != len(self.draft_ids) or not len(ids) or ids[0] < 0 or ids[-1] >= self.vocab_size:
            raise ValueError(f"a map of {len(ids)} tokens to {len(self.draft_ids)}, of {self.vocab_size}")
        if (np.diff(ids) < 1).any() or len(np.unique(self.draft_ids)) != len(ids):
            raise ValueError("the map takes two tokens to one")

    @property
    def overlap(self) -> float:
        """The share of the target's tokens that the draft has, 0 to 1."""
        return len(self.target_ids) / self.num_tokens

    def __str__(self) -> str:
        return f"{100 * self.overlap:.4g} % of the target's tokens ({len(self.target_ids)} of {self.num_tokens})"


def map_vocabulary(target: Tokenizer, vocab_size: int, draft: Tokenizer, draft_vocab_size: int) -> VocabularyMap | None:
    """Map tokens with equal text, special ones only to special ones, and bos and the first eos by their roles.

    Returns None if there are no common tokens. vocab_size, draft_vocab_size: rows of the models.
    """
    ids, draft_ids = _ids_by_text(target, vocab_size), _ids_by_text(draft, draft_vocab_size)
    pairs = {token_id: draft_ids[key] for key, token_id in ids.items() if key in draft_ids}
    taken = set(pairs.values())
    for one, other in ((target.bos_token_id, draft.bos_token_id), (_first_end(target), _first_end(draft))):
        is_free = one in ids.values() and one not in pairs and other in draft_ids.values() and other not in taken
        if one is not None and other is not None and is_free:
            pairs[one] = other
            taken.add(other)
    if not pairs:
        return None
    texts = {text: token_id for (is_special, text, count), token_id in draft_ids.items() if not (is_special or count)}
    pieces = {token_id: tuple(_pieces(text, texts)) for (_, text, _), token_id in ids.items() if token_id not in pairs}
    common = np.array(sorted(pairs.items()), np.int32)
    return VocabularyMap(vocab_size, len(ids), common[:, 0], common[:, 1], pieces)


def _first_end(tokenizer: Tokenizer) -> int | None:
    return next(iter(tokenizer.eos_token_ids), None)


def _ids_by_text(tokenizer: Tokenizer, num_rows: int) -> dict[_Key, int]:
    """Return ids by (is special, text, number of earlier tokens with this text). Shorter spellings come first."""
    found: dict[_Key, int] = {}
    special = tokenizer.special_tokens
    for _, token_id in sorted(tokenizer.vocabulary.items(), key=lambda entry: (len(entry[0]), entry[1])):
        count, is_special, text = 0, token_id in special, tokenizer.token_bytes(token_id)
        while (is_special, text, count) in found:
            count += 1
        if token_id < num_rows:
            found[is_special, text, count] = token_id
    return found


def _pieces(text: bytes, ids: Mapping[bytes, int]) -> Iterator[int]:
    """Yield the ids of the longest tokens from the left; bytes that begin no token are skipped."""
    first = 0
    while first < len(text):
        lengths = range(min(len(text) - first, _MAX_PIECE_BYTES), 0, -1)
        length = next((n for n in lengths if text[first : first + n] in ids), 0)
        if length:
            yield ids[text[first : first + length]]
        first += length or 1


class MappedVocabulary(_OtherVocabulary):
    """Weights with an embedding indexed by the target's ids and an LM head of the common tokens only, not tied to it.

    Embedding rows of ids without a token or pieces are zeros.
    """

    def __init__(self, weights: Weights, vocabulary: VocabularyMap, is_tied: bool) -> None:
        super().__init__(weights)
        self._map = vocabulary
        self._head = _EMBEDDING if is_tied else _HEAD

    def shape(self, name: str) -> tuple[int, ...]:
        if name == _HEAD:
            return (len(self._map.target_ids), *super().shape(self._head)[1:])
        shape = super().shape(name)
        return (self._map.vocab_size, *shape[1:]) if name == _EMBEDDING else shape

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        if name == _HEAD:
            head: npt.NDArray[Any] = super().read(self._head, dtype)[self._map.draft_ids]
            return head
        tensor = super().read(name, dtype)
        if name != _EMBEDDING:
            return tensor
        found = np.zeros(self.shape(name), dtype)
        found[self._map.target_ids] = tensor[self._map.draft_ids]
        for token_id, pieces in self._map.pieces.items():
            if pieces:
                rows = tensor[list(pieces)]
                mean = (float32_from_bfloat16(rows) if dtype is np.uint16 else rows).mean(0)
                found[token_id] = converted(mean, dtype)
        return found


def map_config(config: ModelConfig, vocabulary: VocabularyMap) -> ModelConfig:
    return dataclasses.replace(config, vocab_size=vocabulary.vocab_size, tie_word_embeddings=False)
