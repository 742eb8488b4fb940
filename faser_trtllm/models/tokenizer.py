"""Encode, decode and detokenize incrementally with the `tokenizers` library."""

from __future__ import annotations

import codecs
import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from faser_trtllm.errors import CheckpointError, reason_of
from faser_trtllm.json_text import parse_json
from faser_trtllm.models.config import read_json, token_ids

TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILES = ("generation_config.json", "config.json")
MAX_TOKEN_ID = (1 << 21) - 1  # the largest vocabularies have about 2^18 tokens
MAX_CACHED_WORDS = 1_000  # words whose tokens the library keeps; without them encoding takes 1/8 longer
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_CONTEXT_TOKENS = 4

_END_TOKENS = frozenset(
    (
        *("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<\uff5cend▁of▁sentence\uff5c>"),
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<turn|>"),
        *("<EOT>", "_<EOT>", "▁<EOT>", "[EOT]", "[e~[", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        "<|tool_response>",
        # Written after filled-in code: padding, the next file, the next repository.
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    )
)
"""Names of added tokens that end a text in known models, as in llama.cpp."""
_NO_ENDS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|calls|>", "<|flush|>"}),
    ("</s>", {"<|tool_response>"}),
)
"""(token, others): if a vocabulary has all the others, the token does not end a turn: it ends a message or is HTML."""


class Tokenizer:
    """A tokenizer.json with its bos and eos ids. Immutable; safe to share between threads.

    bos_token_id: None if the model has none; tokenizer.json decides if encode() adds it.
    eos_token_ids: ids that end a text, the tokenizer's own eos_token first. They come from tokenizer_config.json,
        special_tokens_map.json, generation_config.json and config.json. Added tokens that are known to end texts count
        if the chat template writes them or no template is known (GGUF).
    unreachable_end_ids: end tokens without a row in the model, so no text can end with them.
    """

    def __init__(self, definition: str, bos_token_id: int | None = None, eos_token_ids: tuple[int, ...] = ()) -> None:
        """Parse definition, the text of a tokenizer.json; CheckpointError if it cannot be used."""
        data = _checked(definition)
        self._backend = _from_definition(definition)
        self._backend.encode_special_tokens = True
        self._special_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.unreachable_end_ids: tuple[int, ...] = ()
        decoder_types = _decoder_types(data.get("decoder"))
        if "ByteLevel" in decoder_types and decoder_types != ["ByteLevel"]:
            raise CheckpointError(
                f"{TOKENIZER_FILE}: the decoder combines {', '.join(decoder_types)}, ByteLevel is supported only alone"
            )
        self._byte_level = decoder_types == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in decoder_types
        self._bytes_cache: dict[int, bytes] = {}

    @classmethod
    def load(cls, directory: Path, vocab_size: int | None = None, stated: Sequence[int] = ()) -> Tokenizer:
        """Read the tokenizer of a checkpoint or engine directory; CheckpointError if it is missing or cannot be used.

        vocab_size: rows of the model; its configured end ids must be smaller. stated: further end ids.
        """
        try:
            definition = (directory / TOKENIZER_FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise CheckpointError(
                f"{TOKENIZER_FILE} is missing in {directory}; save the fast tokenizer there (save_pretrained)"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{TOKENIZER_FILE} cannot be read in {directory}: {reason_of(error)}") from error
        tokenizer = cls(definition)
        names = ("tokenizer_config.json", "special_tokens_map.json")
        settings = [_optional_json(directory / name) for name in names]
        own = {kind: [tokenizer._own_id(s, kind) for s in settings] for kind in ("bos", "eos")}
        begins = [*(_optional_json(directory / name).get("bos_token_id") for name in _CONFIG_FILES), *own["bos"]]
        bos = next((found for found in begins if found is not None), None)
        tokenizer.bos_token_id = next(iter(token_ids(bos, f"bos_token_id in {directory}")), None)
        eos = [found for found in own["eos"] if found is not None]
        template = _template(directory, settings[0])
        tokenizer.end_at([*eos, *end_ids_of(directory, vocab_size), *stated], vocab_size, template)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of tokens including added ones; a model's vocab_size is often padded to more."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def definition(self) -> str:
        """An equivalent tokenizer.json as text."""
        return str(self._backend.to_str())

    def end_at(self, end_ids: Sequence[int], vocab_size: int | None = None, template: str | None = None) -> None:
        """Set the end ids to end_ids and the ids of added tokens that are known to end texts.

        vocab_size: rows of the model; larger ids become unreachable_end_ids. None: a row for every id.
        template: chat template that must contain the added tokens; None: unknown, so all of them count.
        """
        names = {token.content: i for i, token in self._backend.get_added_tokens_decoder().items()}
        others = [token for token, marks in _NO_ENDS if marks <= names.keys()]
        known = {token for token in _END_TOKENS & names.keys() if template is None or token in template}
        named = sorted(names[token] for token in known if token not in others)
        found = tuple(dict.fromkeys((*end_ids, *named)))
        limit = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
        self.eos_token_ids = tuple(i for i in found if i < limit)
        self.unreachable_end_ids = tuple(i for i in found if i >= limit)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text.

        add_special_tokens: add the tokens of tokenizer.json's post-processor (for many models, bos).
        parse_special_tokens: turn "<|eot|>" in the text into that token, for rendered chat templates; by default it
            stays text, so that users cannot forge turns.
        """
        backend = self._parsing_backend if parse_special_tokens else self._backend
        # encode() would hold the GIL, compute offsets and take twice as long.
        try:
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            raise _failure("cannot encode this text", error) from error
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all ids; unknown ids are skipped, incomplete UTF-8 becomes U+FFFD."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary entry of an id, as spelled in tokenizer.json."""
        return self._backend.id_to_token(token_id)  # type: ignore[no-any-return]

    def token_id(self, token: str) -> int | None:
        with contextlib.suppress(UnicodeEncodeError):  # half of a surrogate pair, which no vocabulary has
            return self._backend.token_to_id(token)  # type: ignore[no-any-return]
        return None

    def is_special(self, token: str) -> bool:
        """Return True for a special token, which decode() leaves out by default."""
        return self.token_id(token) in self._special_ids

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, including added ones, by their spelling in tokenizer.json."""
        return self._backend.get_vocab(with_added_tokens=True)  # type: ignore[no-any-return]

    @functools.cached_property
    def special_tokens(self) -> Mapping[int, str]:
        return {token_id: self.token(token_id) or "" for token_id in self._special_ids}

    def has_added_token(self, text: str) -> bool:
        """Return True if a text contains an added token, such as "<|eot|>"."""
        return any(token.content in text for token in self._backend.get_added_tokens_decoder().values())

    def fingerprint(self) -> str:
        """Return a sha256 (hex) over ids and tokens, equal for tokenizers whose ids mean the same tokens."""
        digest = hashlib.sha256()
        for token, token_id in sorted(self.vocabulary.items(), key=lambda item: item[1]):
            digest.update(f"{token_id} {token!r}\n".encode())
        return digest.hexdigest()

    def first_difference(self, other: Tokenizer, names: tuple[str, str] = ("one", "the other")) -> str | None:
        """Return a clause about the lowest id whose token differs, None if all agree. names: of self and other."""
        mine = {token_id: token for token, token_id in self.vocabulary.items()}
        theirs = {token_id: token for token, token_id in other.vocabulary.items()}
        if mine == theirs:
            return None
        token_id = min(i for i in mine.keys() | theirs.keys() if mine.get(i) != theirs.get(i))
        described = [repr(v[token_id]) if token_id in v else "no token" for v in (mine, theirs)]
        return f"id {token_id} is {described[0]} in {names[0]} and {described[1]} in {names[1]}"

    @functools.cached_property
    def _parsing_backend(self) -> Any:
        # encode_special_tokens is a setting of the backend, which threads share, so parsing has its own backend.
        return _from_definition(self._backend.to_str())

    def _own_id(self, settings: Mapping[str, Any], kind: str) -> int | None:
        """Return the id of eos_token or bos_token in settings, which may add that token themselves; None if unset."""
        token = settings.get(f"{kind}_token")
        content = token.get("content") if isinstance(token, dict) else token
        found = self.token_id(content) if isinstance(content, str) else None
        added = settings.get("added_tokens_decoder")
        if found is None and content is not None and isinstance(added, dict):
            ids = [key for key, entry in added.items() if isinstance(entry, dict) and entry.get("content") == content]
            found = next((int(key) for key in ids if key.isascii() and key.isdigit() and len(key) < 10), None)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token's text. ByteLevel tokens are mapped back to bytes if all their characters stand
        for one. In other tokenizers SentencePiece's space mark becomes a space; with ByteFallback <0x0A> is byte 10."""
        cached = self._bytes_cache.get(token_id)
        if cached is None:
            token = self.token(token_id) or ""
            if not self._byte_level:
                match = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
                return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
            values = [_BYTE_OF_CHAR.get(char) for char in token]
            known = [value for value in values if value is not None]
            cached = bytes(known) if len(known) == len(values) else token.encode()
            self._bytes_cache[token_id] = cached
        return cached


class IncrementalDetokenizer:
    """Turns one request's ids into text step by step: the results of push() and finish() concatenate to decode().

    Holds back characters with incomplete UTF-8 bytes. push() takes time linear in its ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, before: Sequence[int] = ()) -> None:
        """Start after the ids `before`, such as a prompt's, without which SentencePiece's decoders drop a space."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer._special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context = self._context_of(before)

    @property
    def is_within_character(self) -> bool:
        """True if the last ids began a character that later ones complete."""
        return bool(self._utf8.getstate()[0])

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete."""
        tokenizer = self._tokenizer
        ids = [i for i in ids if i not in self._skipped and tokenizer.token(i) is not None]
        if tokenizer._byte_level:
            return self._utf8.decode(b"".join(map(tokenizer.token_bytes, ids)))
        if not tokenizer._byte_fallback:
            return self._text_of(ids)
        text, plain = [], []
        for token_id in ids:
            match = _BYTE_TOKEN.fullmatch(tokenizer.token(token_id) or "")
            if match is None:
                plain.append(token_id)
                continue
            text += [
                self._end_bytes(plain),
                self._text_of(plain),
                self._text_of_byte(token_id, int(match[1], 16)),
            ]
            plain = []
        return "".join([*text, self._end_bytes(plain), self._text_of(plain)])

    def peek(self, token_id: int) -> str:
        """Return the text that this id would complete, without taking it; for special tokens their spelling."""
        if token_id in self._skipped:
            return self._tokenizer.token(token_id) or ""
        state, context = self._utf8.getstate(), self._context
        text = self.push([token_id])
        self._utf8.setstate(state)
        self._context = context
        return text

    def finish(self) -> str:
        """Return the text still held back, as U+FFFD; call once, after the last push."""
        return self._utf8.decode(b"", True)

    def _context_of(self, before: Sequence[int]) -> list[int]:
        """Return the last ids that push() would keep as context: whole tokens, or one byte token if there are none."""
        tokenizer = self._tokenizer
        if tokenizer._byte_level:
            return []
        found = (i for i in reversed(before) if i not in self._skipped and tokenizer.token(i) is not None)
        last = list(itertools.islice(found, _CONTEXT_TOKENS))[::-1]
        if not tokenizer._byte_fallback:
            return last
        return [i for i in last if _BYTE_TOKEN.fullmatch(tokenizer.token(i) or "") is None] or last[:1]

    def _end_bytes(self, plain: list[int]) -> str:
        return self.finish() if plain else ""

    def _text_of_byte(self, token_id: int, value: int) -> str:
        if not self._context:
            self._context = [token_id]
            if value == ord(" "):  # decoders may strip the first space of a text
                return self._backend_text([token_id])
        return self._utf8.decode(bytes([value]))

    def _text_of(self, ids: list[int]) -> str:
        """Return the text of these ids after the earlier ones; at the start of a text they might lose a space."""
        if not ids:
            return ""
        known = len(self._backend_text(self._context))
        ids = self._context + ids
        self._context = ids[-_CONTEXT_TOKENS:]
        return self._backend_text(ids)[known:]

    def _backend_text(self, ids: list[int]) -> str:
        try:
            return str(self._tokenizer._backend.decode(ids, skip_special_tokens=False)) if ids else ""
        except BaseException as error:
            raise _failure("cannot decode these tokens", error) from error


def _checked(definition: str) -> dict[str, Any]:
    """Parse a tokenizer.json; refuse token ids that are too large, since the library visits every id up to them."""
    try:
        data = parse_json(definition)
    except ValueError as error:
        raise CheckpointError(f"{TOKENIZER_FILE} cannot be used: {error}") from error
    model, added = (data.get(key) if isinstance(data, dict) else None for key in ("model", "added_tokens"))
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = [*vocab.values()] if isinstance(vocab, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    largest = max((i for i in ids if isinstance(i, int)), default=0)
    if not isinstance(model, dict) or largest > MAX_TOKEN_ID:
        found = f"it has token id {largest!r:.20}, at most {MAX_TOKEN_ID} are read" if model else "it has no model"
        raise CheckpointError(f"{TOKENIZER_FILE} cannot be used: {found}")
    return data  # type: ignore[no-any-return]


def _from_definition(definition: str) -> Any:
    try:
        backend = tokenizers.Tokenizer.from_str(definition)
    except BaseException as error:
        raise _failure("cannot be used", error) from error
    backend.no_truncation()
    backend.no_padding()
    # The library never evicts: by default 10,000 words of strange prompts would stay, at up to 6 KB each.
    if isinstance(backend.model, tokenizers.models.BPE | tokenizers.models.Unigram):
        backend.model._resize_cache(MAX_CACHED_WORDS)
    return backend


def _failure(what: str, error: BaseException) -> BaseException:
    """Convert the library's error, a bare Exception or Rust panic, to CheckpointError; return others unchanged."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    reason = str(error).partition("\n")[0]  # a backtrace may follow
    return CheckpointError(f"{TOKENIZER_FILE} {what}: {reason}")


def _decoder_types(decoder: Any) -> list[str]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [kind for part in decoder.get("decoders", []) for kind in _decoder_types(part)]
    return [str(decoder.get("type"))]


def _byte_of_char() -> dict[str, int]:
    """Return the byte that each of GPT-2's printable characters stands for (openai/gpt-2, encoder.py)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _template(directory: Path, settings: Mapping[str, Any]) -> str:
    """Return the text of all chat templates in a directory; "" without one."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    return json.dumps(settings.get("chat_template", ""), ensure_ascii=False)


def end_ids_of(directory: Path, vocab_size: int | None = None) -> list[int]:
    """Return the end ids in a directory's configurations; CheckpointError for invalid ids, or beyond vocab_size."""
    found: list[int] = []
    for name in _CONFIG_FILES:
        what = f"{name} in {directory}: eos_token_id"
        ids = token_ids(_optional_json(directory / name).get("eos_token_id"), what)
        check_end_ids(ids, vocab_size, what)
        found += ids
    return found


def check_end_ids(ids: Sequence[int], vocab_size: int | None, what: str) -> None:
    """Raise CheckpointError, which starts with `what`, for an id of at least vocab_size; None: no limit."""
    largest = max(ids, default=0)
    if vocab_size is not None and largest >= vocab_size:
        raise CheckpointError(f"{what} is {largest}, the model's ids are 0 to {vocab_size - 1}; correct or remove it")
