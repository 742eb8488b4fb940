"""What the engine says of a request: chunks of its output, and its failure."""

from __future__ import annotations

import msgspec

from faser_trtllm.serving.text.request import Statistics


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

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None

    def followed_by(self, chunk: Chunk) -> Chunk:
        """This chunk and the next as one."""
        return Chunk(
            id=self.id,
            text=self.text + chunk.text,
            token_ids=self.token_ids + chunk.token_ids,
            finish_reason=chunk.finish_reason,
            statistics=chunk.statistics,
            log_probs=self.log_probs + chunk.log_probs,
            logits=self.logits + chunk.logits,
            is_draft=self.is_draft + chunk.is_draft,
        )


class Failed(msgspec.Struct, frozen=True):
    """A request ended with an error. code: a Triton status."""

    id: int
    code: str
    message: str
