"""The check of a request before the executor takes it: the only place that validates prompts and sampling values.

Knows token ids and engine limits; serving/ handles text and tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

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

    drafters: the server's; without any the parameter means nothing, as num_draft_tokens then does.
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
    if num_tokens >= max_seq_len:
        raise InvalidArgumentError(
            f"has {num_tokens} tokens, the engine takes at most {max_seq_len - 1} "
            f"(max_seq_len {max_seq_len} with one token of output); shorten the prompt",
            "prompt_tokens",
            num_tokens,
            max_seq_len - 1,
        )
    check_token_ids("prompt", prompt_token_ids, vocab_size)
