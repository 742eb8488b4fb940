"""The model that the OpenAI server serves, and checks of prompt lengths."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from faser_trtllm.errors import FaserError, InvalidArgumentError
from faser_trtllm.executor.admission import check_prompt_length
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.parsers.registry import is_harmony
from faser_trtllm.serving.text.length_check import LengthCheck

if TYPE_CHECKING:
    from faser_trtllm.serving.openai.chat_template import ChatTemplate

PROMPT_TOKENS = "prompt_tokens"
"""The field of errors about a prompt's length."""

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts about the model that the parsing of requests needs."""

    name: str
    tokenizer: Tokenizer | None = None  # None if its files are unavailable; then chat and logprobs are refused
    chat_template: ChatTemplate | None = None
    max_seq_len: int | None = None  # None if unknown
    tool_parser: str | None = None  # None if the model does not call functions
    reasoning_parser: str | None = None  # None if the model does not reason
    spec_decode_metrics: str = "none"  # one of records.LEVELS
    _length: LengthCheck | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Raise InvalidArgumentError if the parsers read different formats."""
        is_harmony(self.tool_parser, self.reasoning_parser)
        if self.tokenizer is not None and self.max_seq_len is not None:
            object.__setattr__(self, "_length", LengthCheck(self.tokenizer, self.max_seq_len))

    @property
    def is_harmony(self) -> bool:
        """True if all answers are harmony's messages."""
        return is_harmony(self.tool_parser, self.reasoning_parser)

    def check_size(self, num_chars: int) -> None:
        """Raise InvalidArgumentError if no prompt of num_chars characters fits into the model."""
        if self._length is not None:
            self._length.check_size(PROMPT_TOKENS, num_chars)

    def check_length(self, prompt: Prompt, parse_special_tokens: bool = False) -> None:
        """Raise InvalidArgumentError if a prompt of token ids is too long, or a text is far too long."""
        if isinstance(prompt, str):
            if self._length is not None:
                self._length.check(PROMPT_TOKENS, prompt, parse_special_tokens)
        elif self.max_seq_len is not None:
            check_prompt_length(len(prompt), self.max_seq_len)


@contextlib.contextmanager
def naming_length(param: str) -> Iterator[None]:
    """Convert errors about a prompt's length, raised inside, to errors about `param` with OpenAI's message."""
    try:
        yield
    except InvalidArgumentError as error:
        raise too_long(error, param) if error.field == PROMPT_TOKENS else error from None


def too_long(error: FaserError, param: str) -> RequestError:
    """Return an error with OpenAI's message, since clients such as litellm search for its words, not for the code."""
    length = int(error.limit or 0) + 1  # includes one output token
    message = f"this model's maximum context length is {length} tokens: {error}"
    return RequestError(message, param=param, reason="context_length_exceeded")
