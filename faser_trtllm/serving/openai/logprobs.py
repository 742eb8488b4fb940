"""Formats log probs of tokens in the two formats of OpenAI: that of chats and that of completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faser_trtllm.models.tokenizer import IncrementalDetokenizer, Tokenizer
from faser_trtllm.serving.client import Context, Response, Top

_MAX_PROMPT_END_CHARS = 256
_MIN_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON does not have


@dataclass(slots=True)
class Entry:
    """A token in an answer."""

    text: str  # the text that the token adds to the answer
    logprob: float | None  # None for the first token of a prompt
    offset: int  # of the text in the answer, in characters
    top: list[tuple[str, float]]  # texts and log probs of the most probable tokens at its position, best first


class Logprobs:
    """Converts the tokens of one sequence to entries, and formats these.

    A token's text is the text that it adds to the answer: a token that ends inside a character adds nothing, and the
    token that completes the character adds it. The texts therefore concatenate to the answer, except if a stop word
    begins inside the last token: the answer ends before the word, but the token is whole. An alternative's text is the
    text that it would add.
    """

    def __init__(
        self, tokenizer: Tokenizer, is_chat: bool, prompt: str | Sequence[int], inputs: Mapping[str, Any]
    ) -> None:
        """inputs: the request's Triton inputs; only those about special tokens are read."""
        skips = bool(inputs.get("skip_special_tokens", True))
        parses = bool(inputs.get("parse_special_tokens", False))
        self._tokenizer = tokenizer
        self._skips_in_prompt = not parses if isinstance(prompt, str) else skips
        self._added = tokenizer.encode("") if isinstance(prompt, str) and inputs.get("add_special_tokens", True) else []
        if isinstance(prompt, str):  # the detokenizer needs only its end, in any tokenization
            prompt = tokenizer.encode(prompt[-_MAX_PROMPT_END_CHARS:], parse_special_tokens=parses)
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skips, before=prompt)
        self._is_chat = is_chat
        self._offset = 0

    def of_context(self, context: Context, text: str) -> list[Entry]:
        """Return the entries of the prompt; must be called before of_output().

        text: the prompt in the answer, which lacks special tokens that were added or are left out.
        """
        ids, log_probs, tops = context.token_ids, (None, *context.log_probs), context.tops and ((), *context.tops)
        n = len(self._added) if list(ids[: len(self._added)]) == self._added else 0
        found = self._read(IncrementalDetokenizer(self._tokenizer), ids[:n], log_probs[:n], tops[:n])
        detokenizer = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=self._skips_in_prompt)
        found += self._read(detokenizer, ids[n:], log_probs[n:], tops[n:])
        found[-1].text += detokenizer.finish()
        self._offset = len(text)
        return found

    def of_output(self, delta: Response) -> list[Entry]:
        """Return the entries of a delta's tokens; deltas must come in their order."""
        return self._read(self._detokenizer, delta.token_ids, delta.log_probs, delta.tops)

    def spell(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Return the value of a choice's field `logprobs`."""
        if self._is_chat:
            return {
                "content": [
                    _token(entry.text, entry.logprob) | {"top_logprobs": [_token(*one) for one in entry.top]}
                    for entry in entries
                ],
                "refusal": None,
            }
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [_by_text(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _read(
        self,
        detokenizer: IncrementalDetokenizer,
        token_ids: Sequence[int],
        log_probs: Sequence[float | None],
        tops: Sequence[Top],
    ) -> list[Entry]:
        found = []
        for token, log_prob, top in zip(token_ids, log_probs, tops or [()] * len(token_ids), strict=True):
            others = {other: detokenizer.peek(other) for other, _ in top if other != token}
            text = detokenizer.push([token])
            named = [(others.get(other, text), _finite(logprob)) for other, logprob in top]
            found.append(Entry(text, None if log_prob is None else _finite(log_prob), self._offset, named))
            self._offset += len(text)
        return found


def _by_text(entry: Entry) -> dict[str, float] | None:
    """Map texts of the most probable tokens and of the token itself to log probs; of equal texts, take the first."""
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    pairs: Iterable[tuple[str, float]] = (*entry.top, (entry.text, entry.logprob))
    for text, logprob in pairs:
        found.setdefault(text, logprob)
    return found


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
