"""Text in which a token's name is the token in some places and letters in others."""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Sequence

from faser_trtllm.models.tokenizer import Tokenizer


class MixedText:
    """Encodes texts as the tokenizer does, but for names of added tokens that are to stay letters.

    A tokenizer takes each text for one of its own, so that SentencePiece's puts a space before each piece of a text.
    Therefore the text stays whole, and where names are to be letters, tokens get other names, in a copy of the
    tokenizer. Immutable, so threads may share it.
    """

    def __init__(self, tokenizer: Tokenizer, names: Sequence[str]) -> None:
        """names: of the added tokens that may be letters, at least one."""
        self._tokenizer = tokenizer
        self._aliases = {name: f"\ue000{secrets.token_hex(8)}\ue001" for name in names}
        self._pattern = re.compile(alternatives(names))

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Token ids of the pieces together. Those with odd index are letters."""
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
        """The copy, and its ids of added tokens -> the tokenizer's."""
        definition = json.loads(self._tokenizer.definition)
        names = [token["content"] for token in definition["added_tokens"]]
        for token in definition["added_tokens"]:
            if token["content"] in self._aliases:
                token |= {"content": self._aliases[token["content"]], "special": False, "normalized": False}
        renamed = Tokenizer(json.dumps(definition))
        found = {renamed.token_id(self._aliases.get(name, name)): self._tokenizer.token_id(name) for name in names}
        return renamed, {own: theirs for own, theirs in found.items() if own is not None and theirs is not None}


def alternatives(names: Sequence[str]) -> str:
    """A regex of the names, the longest of those that begin in one place first."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
