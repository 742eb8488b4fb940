"""The model that the OpenAI server has, and which prompts are too long for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from faser_trtllm.errors import FaserError, InvalidArgumentError
from faser_trtllm.executor.admission import check_prompt_length
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.text.length_check import LengthCheck

if TYPE_CHECKING:
    from faser_trtllm.serving.openai.chat_template import ChatTemplate

PROMPT_TOKENS = "prompt_tokens"
"""The field of errors about a prompt's length."""

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that requests are parsed for.

    tokenizer: None if its files are unavailable; then chat and logprobs are refused. max_seq_len: None if unknown.
    """

    name: str
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    max_seq_len: int | None = None
    _length: LengthCheck | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.tokenizer is not None and self.max_seq_len is not None:
            object.__setattr__(self, "_length", LengthCheck(self.tokenizer, self.max_seq_len))

    def check_size(self, num_chars: int) -> None:
        """Raise InvalidArgumentError if no prompt of so many characters fits into the model."""
        if self._length is not None:
            self._length.check_size(PROMPT_TOKENS, num_chars)

    def check_length(self, prompt: Prompt) -> None:
        """Raise InvalidArgumentError if a prompt is too long: a text if it is by far, token ids in any case."""
        if isinstance(prompt, str):
            if self._length is not None:
                self._length.check(PROMPT_TOKENS, prompt)
        elif self.max_seq_len is not None:
            check_prompt_length(len(prompt), self.max_seq_len)


@contextlib.contextmanager
def naming_length(param: str) -> Iterator[None]:
    """Raise errors about a prompt's length as the client knows them."""
    try:
        yield
    except InvalidArgumentError as error:
        raise too_long(error, param) if error.field == PROMPT_TOKENS else error from None


def too_long(error: FaserError, param: str) -> RequestError:
    """In the words of OpenAI's own message, since clients such as litellm look for them and not for the code."""
    length = int(error.limit or 0) + 1  # with a token of output
    message = f"this model's maximum context length is {length} tokens: {error}"
    return RequestError(message, param=param, reason="context_length_exceeded")
