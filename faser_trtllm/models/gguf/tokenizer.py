"""Convert the tokenizer in GGUF metadata to a tokenizer.json.

tokenizer.ggml.model "gpt2" is a byte-level BPE with merges, whose splitting regex is chosen by tokenizer.ggml.pre;
"llama" is a SentencePiece BPE, whose merges follow from its scores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.tokenizer import check_end_ids

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_PADDING = re.compile(r"\[PAD\d+\]")
_REMEDY = "give a folder with the model's tokenizer.json as --tokenizer_dir"
_SPACE = "\u2581"
_MAX_TOKEN_CHARS = 1024  # bounds the splits that are tried; SentencePiece's default is 16

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_CASED = "".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{word}(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
)


@dataclass(frozen=True, slots=True)
class _Pre:
    """The pre-tokenizer of a family. split: regex that splits text before ByteLevel; None: ByteLevel's own, GPT-2's."""

    split: str | None
    splits_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


# The regexes are those of the models' own tokenizer.json.
_GPT2 = _Pre(None)
_LLAMA3 = _Pre(_WORDS + r"\p{N}{1,3}" + _REST, ignore_merges=True, add_bos=True)
_QWEN2 = _Pre(_WORDS + r"\p{N}" + _REST, nfc=True)
_GPT4O = _Pre(_CASED + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES, ignore_merges=True)
_OLMO = _Pre(None, nfc=True)
_SMOLLM = _Pre(None, splits_digits=True)
_PRES = {
    "gpt-2": _GPT2,
    "gpt-4o": _GPT4O,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "olmo": _OLMO,
    "smollm": _SMOLLM,
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A converted tokenizer. files: tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja."""

    files: Mapping[str, bytes]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> GgufTokenizer:
    """Convert the tokenizer; CheckpointError, which names source, if it is incomplete or not supported."""
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{source}: tokenizer.ggml.model is {model!r:.60}, only 'gpt2' and 'llama' are read; {_REMEDY}"
        )
    vocabulary = _Vocabulary(metadata, source)
    definition = _byte_level(metadata, vocabulary) if model == "gpt2" else _sentencepiece(metadata, vocabulary)
    settings = {
        f"{kind}_token": vocabulary.tokens[token_id]
        for kind, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token_id := vocabulary.id_of(f"{key}_token_id")) is not None
    }
    files = {
        "tokenizer.json": json.dumps(definition, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=2).encode(),
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        files["chat_template.jinja"] = template.encode()
    ends, bos = special_ids(metadata, source)
    return GgufTokenizer(files, bos, ends)


def special_ids(
    metadata: Mapping[str, Any], source: str, vocab_size: int | None = None
) -> tuple[tuple[int, ...], int | None]:
    """Return the ids that end a text, and bos or None. End ids must be below vocab_size; None: not checked."""
    found = {}
    for kind in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep", "bos"):
        key = f"tokenizer.ggml.{kind}_token_id"
        value = metadata.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise CheckpointError(f"{source}: {key} is {value!r:.80}; it must be a token id")
        if value is not None and kind != "bos":
            check_end_ids([value], vocab_size, f"{source}: {key}")
        found[kind] = value
    bos = found.pop("bos")
    return tuple(dict.fromkeys(value for value in found.values() if value is not None)), bos


class _Vocabulary:
    """Tokens with types and scores. ids: without the tokens that only pad the embedding."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata = metadata
        self.source = source
        self.tokens = self._strings("tokens")
        count = len(self.tokens)
        types = self._numbers("token_type", "iu", count)
        self.types: list[int] = [_NORMAL] * count if types is None else types.tolist()
        self.scores = self._numbers("scores", "f", count)
        self.ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            if self.types[token_id] == _UNUSED and _PADDING.fullmatch(token):
                continue
            if token in self.ids:
                raise CheckpointError(
                    f"{source}: tokenizer.ggml.tokens has {token!r:.80} as {self.ids[token]} and as {token_id}; "
                    f"{_REMEDY}"
                )
            self.ids[token] = token_id

    def id_of(self, key: str) -> int | None:
        """Return the id under a key of tokenizer.ggml; CheckpointError if no token has it."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise CheckpointError(
                f"{self.source}: tokenizer.ggml.{key} is {value!r:.80}, there are {len(self.tokens)} tokens"
            )
        return value

    def merges(self) -> list[tuple[str, str]]:
        """Return the pairs in tokenizer.ggml.merges. A space separates them, and the first token may start with one."""
        pairs = []
        for merge in self._strings("merges"):
            cut = merge.find(" ", 1)
            pair = (merge[:cut], merge[cut + 1 :])
            if cut < 0 or not all(part in self.ids for part in (*pair, "".join(pair))):
                raise CheckpointError(
                    f"{self.source}: tokenizer.ggml.merges has {merge!r:.80}, which joins no two tokens"
                )
            pairs.append(pair)
        return pairs

    def added(self) -> list[dict[str, Any]]:
        """Return control and user-defined tokens as entries of tokenizer.json."""
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": token_id, "content": token, "special": self.types[token_id] != _USER_DEFINED} | plain
            for token, token_id in self.ids.items()
            if self.types[token_id] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._metadata.get(f"tokenizer.ggml.{key}", default))

    def template(self, add_bos: bool) -> dict[str, Any] | None:
        """Return the post-processor that adds bos and eos, None if neither. add_bos: default of add_bos_token."""
        ends = {"bos": self.flag("add_bos_token", add_bos), "eos": self.flag("add_eos_token", False)}
        ids = {kind: self.id_of(f"{kind}_token_id") for kind, is_added in ends.items() if is_added}
        tokens = {kind: self.tokens[i] for kind, i in ids.items() if i is not None}
        if not tokens:
            return None

        def around(*texts: dict[str, Any]) -> list[dict[str, Any]]:
            before = [{"SpecialToken": {"id": tokens["bos"], "type_id": 0}}] if "bos" in tokens else []
            after = [{"SpecialToken": {"id": tokens["eos"], "type_id": 0}}] if "eos" in tokens else []
            return [*before, *texts, *after]

        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        special = {token: {"id": token, "ids": [self.ids[token]], "tokens": [token]} for token in tokens.values()}
        return {
            "type": "TemplateProcessing",
            "single": around(first),
            "pair": around(first, second),
            "special_tokens": special,
        }

    def _strings(self, key: str) -> list[str]:
        values = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(values, list) or not values:
            raise CheckpointError(f"{self.source}: tokenizer.ggml.{key} is missing or no list of strings; {_REMEDY}")
        return values

    def _numbers(self, key: str, kinds: str, count: int) -> Any:
        values = self._metadata.get(f"tokenizer.ggml.{key}")
        is_right = isinstance(values, np.ndarray) and values.dtype.kind in kinds and len(values) == count
        if values is not None and not is_right:
            raise CheckpointError(
                f"{self.source}: tokenizer.ggml.{key} does not have one number for each of {count} tokens"
            )
        return values


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre")
    pre = _PRES.get(name) if isinstance(name, str) else None
    if pre is None:
        raise CheckpointError(
            f"{vocabulary.source}: tokenizer.ggml.pre is {name!r:.80}, known are {', '.join(_PRES)}; {_REMEDY}"
        )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre.split is None}
    steps = [{"type": "Split", "pattern": {"Regex": pre.split}, "behavior": "Isolated", "invert": False}]
    if pre.split is None:
        steps = [{"type": "Digits", "individual_digits": True}] if pre.splits_digits else []
    return _definition(
        vocabulary,
        {"merges": vocabulary.merges(), "ignore_merges": pre.ignore_merges},
        normalizer={"type": "NFC"} if pre.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        add_bos=pre.add_bos,
    )


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    if vocabulary.scores is None:
        raise CheckpointError(f"{vocabulary.source}: tokenizer.ggml.scores is missing; {_REMEDY}")
    has_prefix = vocabulary.flag("add_space_prefix", True)
    unknown = vocabulary.id_of("unknown_token_id")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, spaces] if has_prefix else [spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {
        "merges": _merges_of_scores(vocabulary),
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": None if unknown is None else vocabulary.tokens[unknown],
    }
    return _definition(
        vocabulary,
        model,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        add_bos=True,
    )


def _merges_of_scores(vocabulary: _Vocabulary) -> Sequence[tuple[str, str]]:
    """Return the merges that make BPE act as SentencePiece: the neighbors whose union has the best score merge first.

    Pairs with the same union follow in the order of their parts' ids, as in transformers' conversion.
    """
    ids, ranked = vocabulary.ids, []
    for token, token_id in ids.items():
        if vocabulary.types[token_id] != _NORMAL:
            continue
        if len(token) > _MAX_TOKEN_CHARS:
            raise CheckpointError(
                f"{vocabulary.source}: tokenizer.ggml.tokens has {token[:40]!r}... of {len(token)} characters as "
                f"{token_id}, at most {_MAX_TOKEN_CHARS} are read; {_REMEDY}"
            )
        score = -float(vocabulary.scores[token_id])
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((score, token_id, left, right, token[:cut], token[cut:]))
    ranked.sort()
    return [entry[4:] for entry in ranked]


def _definition(
    vocabulary: _Vocabulary,
    model: dict[str, Any],
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    add_bos: bool,
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": vocabulary.template(add_bos),
        "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocabulary.ids} | model,
    }
