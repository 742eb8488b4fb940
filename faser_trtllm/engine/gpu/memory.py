"""Compute how many KV blocks fit next to weights and buffers, before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from faser_trtllm.config import Quantization
from faser_trtllm.engine.gpu.sampler.accept import edited_rows
from faser_trtllm.engine.opening import OpenRequest
from faser_trtllm.errors import ConfigError

log = logging.getLogger(__name__)

_GIB = 1 << 30


def fit_blocks(
    request: OpenRequest, weight_bytes: Mapping[str, int], free_bytes: int, buffers: Mapping[str, int] | None = None
) -> int:
    """Return the number of KV blocks of each engine: request.num_blocks, or as many as kv_memory_fraction allows.

    weight_bytes: by role. buffers: bytes by name, in addition to weights, logits, draft probs and KV. Raises
    ConfigError if not even one request of max_seq_len fits or, without a fraction, not all blocks. Graphs and library
    workspaces use what the fraction leaves and are not counted, so a pair that fits may still be too large.
    """
    limits, engines = request.limits, request.engines
    rows = max(min(limits.max_batch_size * (1 + limits.max_draft_len), limits.max_num_tokens), limits.max_batch_size)
    block_bytes = limits.tokens_per_block * request.kv_bytes_per_token
    logits = 4 * len(weight_bytes) * rows * engines.vocab_size
    draft_probs = 4 * limits.max_batch_size * limits.max_draft_len * engines.vocab_size if request.drafting else 0
    needed = {f"weights of the {role}": size for role, size in weight_bytes.items()}
    needed["logits and draft probs"] = logits + draft_probs
    num_branches = request.num_branches * limits.max_batch_size
    edited = edited_rows(rows + num_branches, limits.max_draft_len) + limits.max_batch_size * (draft_probs > 0)
    needed["logits with penalties"] = 4 * edited * engines.vocab_size
    needed |= buffers or {}
    if num_branches:  # an overestimate: branches have no draft KV
        needed["branches"] = num_branches * (4 * engines.vocab_size + block_bytes)
    left = free_bytes - sum(needed.values())
    fraction, least = request.kv_memory_fraction, request.num_blocks
    if fraction is not None:
        left = int(left * fraction)
        least = min(least, -(-limits.max_seq_len // limits.tokens_per_block))
    if left < least * block_bytes:
        needed["KV caches"] = least * block_bytes
        listed = ", ".join(f"{what} {size / _GIB:.2f}" for what, size in needed.items())
        share = "" if fraction is None else f" and {fraction:.0%} of what is left may hold KV"
        smaller = "" if request.quantization is Quantization.FP8 else ", set quantization to fp8"
        fewer = "num_branches, " if num_branches else ""
        raise ConfigError(
            f"the engines need {sum(needed.values()) / _GIB:.2f} GiB of GPU memory ({listed}), the GPU has "
            f"{free_bytes / _GIB:.2f} free{share}; lower {fewer}kv_cache_config.max_tokens, max_seq_len or "
            f"max_batch_size{smaller}, build with a larger --tp_size (cuda) or take a larger GPU"
        )
    num_blocks = min(request.num_blocks, left // block_bytes)
    log.info(
        "KV caches of %d tokens, %.2f GiB, on a GPU with %.2f GiB free",
        num_blocks * limits.tokens_per_block,
        num_blocks * block_bytes / _GIB,
        free_bytes / _GIB,
    )
    return num_blocks
