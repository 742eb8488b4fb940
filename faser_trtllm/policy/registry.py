"""From the configuration's spelling ("off", "fixed:4") to a policy."""

from __future__ import annotations

from faser_trtllm.errors import ConfigError
from faser_trtllm.policy.base import Policy
from faser_trtllm.policy.fixed import FixedPolicy
from faser_trtllm.policy.off import OffPolicy

SPELLINGS = "off, fixed:K"


def make_policy(spelling: str, max_draft_len: int) -> Policy:
    """Parse a policy's spelling; max_draft_len is what the engines were built for."""
    name, _, argument = spelling.partition(":")
    if name == "off" and not argument:
        return OffPolicy()
    if name == "fixed" and argument.isdigit():
        num_draft_tokens = int(argument)
        if num_draft_tokens > max_draft_len:
            raise ConfigError(
                f"speculation is {spelling}, but the engines were built for max_draft_len {max_draft_len}; "
                f"use fixed:{max_draft_len} or less, or rebuild with --max_draft_len {num_draft_tokens}"
            )
        return FixedPolicy(num_draft_tokens) if num_draft_tokens else OffPolicy()
    raise ConfigError(f"speculation is {spelling!r}, allowed is one of: {SPELLINGS} (K a whole number)")
