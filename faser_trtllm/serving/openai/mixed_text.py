"""Encodes text in which the name of a token means the token in some parts and is plain text in others."""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Sequence

from faser_trtllm.models.tokenizer import Tokenizer


class MixedText:
    """Encodes texts like the tokenizer, except that names of added tokens can stay plain text.

    The parts cannot be encoded separately, since a tokenizer treats each as a text of its own: SentencePiece, for
    example, puts a space before it. Instead, a copy of the tokenizer has other names for these tokens, and the text is
    encoded as a whole. Immutable, so threads may share it.
    """

    def __init__(self, tokenizer: Tokenizer, names: Sequence[str]) -> None:
        """names: the names of added tokens, at least one, that a text may contain as plain text."""
        self._tokenizer = tokenizer
        self._aliases = {name: f"\ue000{secrets.token_hex(8)}\ue001" for name in names}
        self._pattern = re.compile(alternatives(names))

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Return the token ids of the pieces together. Pieces with an odd index are plain text."""
        if len(pieces) == 1:
            return self._tokenizer.encode(pieces[0], add_special_tokens=False, parse_special_tokens=True)
        renamed, ids = self._renamed
        text = "".join(
            piece if i % 2 else self._pattern.sub(lambda name: self._aliases[name[0]], piece)
            for i, piece in enumerate(pieces)
        )
        return [ids.get(token, token) for token in renamed.encode(text, add_special_tokens=False)]

    @functools.cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[int, int]]:
        """The copy of the tokenizer, and a map from its ids of added tokens to the original ids."""
        definition = json.loads(self._tokenizer.definition)
        names = [token["content"] for token in definition["added_tokens"]]
        for token in definition["added_tokens"]:
            if token["content"] in self._aliases:
                token |= {"content": self._aliases[token["content"]], "special": False, "normalized": False}
        renamed = Tokenizer(json.dumps(definition))
        found = {renamed.token_id(self._aliases.get(name, name)): self._tokenizer.token_id(name) for name in names}
        return renamed, {own: theirs for own, theirs in found.items() if own is not None and theirs is not None}


def alternatives(names: Sequence[str]) -> str:
    """Return a regex that matches the names, longer ones first."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
