"""What the engine says of a request: chunks of its output, and its failure."""

from __future__ import annotations

import msgspec

from faser_trtllm.serving.text.request import ContextLogProbs, Statistics, TopLogProbs


class Chunk(msgspec.Struct, frozen=True):
    """New output of a request, as in TextOutput; the last chunk has a finish_reason."""

    id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    statistics: Statistics | None = None
    log_probs: tuple[float, ...] = ()
    logits: bytes = b""
    is_draft: tuple[bool, ...] = ()
    tops: TopLogProbs = TopLogProbs()
    context: ContextLogProbs | None = None

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None


class Failed(msgspec.Struct, frozen=True):
    """A request ended with an error. code: a Triton status."""

    id: int
    code: str
    message: str
