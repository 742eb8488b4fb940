"""The check of requests before the executor takes them: all prompts and sampling values are validated here.

It knows token ids and engine limits; serving/ handles text and tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams, check_token_ids
from faser_trtllm.errors import InvalidArgumentError


def check_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    max_seq_len: int,
    drafters: Sequence[str] = (),
) -> None:
    """Raise InvalidArgumentError, in one sentence, if the prompt or a sampling parameter is out of range.

    drafters: names of the server's drafters; if there are none, params.drafters has no effect.
    """
    params.validate(vocab_size)
    for name in (params.drafters or ()) if drafters else ():
        if name not in drafters:
            raise InvalidArgumentError(
                f"has {name[:64]!r}, this server drafts with {' and '.join(drafters)}; name those or leave it out",
                "drafters",
                name,
                ", ".join(drafters),
            )
    num_tokens = len(prompt_token_ids)
    if num_tokens == 0:
        raise InvalidArgumentError("is empty, it needs at least one token", "prompt", 0, "1 token")
    check_prompt_length(num_tokens, max_seq_len)
    check_token_ids("prompt", prompt_token_ids, vocab_size)


def check_prompt_length(num_tokens: int, max_seq_len: int) -> None:
    """Raise InvalidArgumentError if the engine has no room for a prompt and one token of output."""
    if num_tokens >= max_seq_len:
        raise InvalidArgumentError(
            f"has {num_tokens} tokens, the engine takes at most {max_seq_len - 1} "
            f"(max_seq_len {max_seq_len} with one token of output); shorten the prompt",
            "prompt_tokens",
            num_tokens,
            max_seq_len - 1,
        )


@dataclass(frozen=True)
class Admission:
    """Makes the requests of an executor; see Request for the last four fields."""

    vocab_size: int
    max_seq_len: int
    max_draft_len: int
    drafters: tuple[str, ...] = ()  # names of the server's drafters
    keep_candidates: bool = False
    keep_runners_up: bool = False
    is_synthetic: bool = False
    draft_window: int | None = None

    def request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        arrival_s: float,
        priority: float,
        deadline_s: float | None,
    ) -> Request:
        """Return a new request; raise InvalidArgumentError if check_request() refuses it."""
        limits = {"vocab_size": self.vocab_size, "max_seq_len": self.max_seq_len}
        check_request(prompt_token_ids, params, **limits, drafters=self.drafters)
        only_model = {"model"}.issuperset(params.drafters or self.drafters) and not len(params.prediction)
        return Request(
            request_id,
            prompt_token_ids,
            params,
            max_seq_len=self.max_seq_len,
            max_draft_len=self.max_draft_len,
            arrival_s=arrival_s,
            priority=priority,
            deadline_s=deadline_s,
            draft_window=self.draft_window if only_model else None,
            keep_candidates=self.keep_candidates,
            keep_runners_up=self.keep_runners_up,
            is_synthetic=self.is_synthetic,
        )
