"""Log probabilities and logits of a pass's rows that requests ask to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from faser_trtllm.core.counts import Int32Array
from faser_trtllm.core.plan import KeptRows, ScheduledRequests
from faser_trtllm.core.request import Request
from faser_trtllm.native import SEEDED
from faser_trtllm.ops.arrays import SAMPLING_DTYPE, SamplingArray
from faser_trtllm.ops.log_probs import LogProbs, TokenRows
from faser_trtllm.ops.probs import NO_FILTERS
from faser_trtllm.sampling.rejection import RejectionSampler

_NOTHING = KeptRows()


@dataclass(frozen=True, slots=True)
class Kept:
    """A request that keeps rows; its tokens come from the rows of logits from first_row on."""

    index: int
    request: Request
    first_row: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Logit rows needed for prompt log probs, and the rows for rejection sampling, which must be contiguous."""

    asking: Sequence[Kept]
    sampled_rows: Sequence[int]

    @classmethod
    def split(cls, rows: ScheduledRequests, num_verified: Int32Array, num_context: Mapping[int, int]) -> ContextRows:
        """Split a pass's logit rows. The first num_sampled requests have 1 + num_verified[index] rows for sampling.
        num_context: by index, the number of rows for prompt log probs, which come before them."""
        asking: list[Kept] = []
        sampled_rows: list[int] = []
        end = 0
        for index, (request, num_drafts) in enumerate(zip(rows.requests, num_verified.tolist(), strict=True)):
            count = num_context.get(index, 0)
            if count:
                known = len(request.context_log_probs) + 1
                asking.append(Kept(index, request, end, request.tokens[known : known + count].tolist()))
            end += count
            if index < rows.num_sampled:
                sampled_rows += range(end, end + 1 + num_drafts)
                end += 1 + num_drafts
        return cls(asking, sampled_rows)

    def keep(self, logits: Any, sampler: RejectionSampler) -> dict[int, KeptRows]:
        """Return log probs of prompt tokens, by index."""
        entry = np.zeros(1, SAMPLING_DTYPE)
        entry["mode"] = SEEDED
        for name in ("temperature", "top_p", "repetition_penalty"):
            entry[name] = 1.0
        entries = np.repeat(entry, sum(len(one.token_ids) for one in self.asking))
        found = _log_probs(self.asking, entries, logits, sampler)
        return {
            index: KeptRows(context_log_probs=part.values.tolist(), context_tops=part.tops)
            for index, part in found.items()
        }


def keep_rows(
    keeping: Sequence[Kept],
    sampling: SamplingArray,
    logits: Any,
    vocab_size: int,
    sampler: RejectionSampler,
    context: Mapping[int, KeptRows],
) -> dict[int, KeptRows]:
    """Return what requests keep by index, including `context`. logits: [num_rows, >= vocab_size], as sampled."""
    asking = [one for one in keeping if one.request.params.return_log_probs]
    log_probs = _log_probs(asking, _entries(asking, sampling), logits, sampler)
    found = dict(context)
    keeps_logits = any(one.request.params.return_generation_logits for one in keeping)
    host_logits = logits[:, :vocab_size] if keeps_logits else None  # a GPU's logits are copied once for all requests
    for one in keeping:
        kept = context.get(one.index, _NOTHING)
        if one.index in log_probs:
            part = log_probs[one.index]
            kept = replace(kept, log_probs=part.values.tolist(), tops=part.tops)
        if host_logits is not None and one.request.params.return_generation_logits:
            end = one.first_row + len(one.token_ids)
            kept = replace(kept, logits=[row.copy() for row in host_logits[one.first_row : end]])
        found[one.index] = kept
    return found


def _entries(asking: Sequence[Kept], sampling: SamplingArray) -> SamplingArray:
    """Return sampling entries whose distributions are those to report, one per token."""
    counts = [len(one.token_ids) for one in asking]
    entries = np.repeat(sampling[[one.request.slot for one in asking]], counts)
    keeps_filters = np.repeat([one.request.params.normalize_log_probs for one in asking], counts).astype(bool)
    temperatures = np.repeat([one.request.params.log_prob_temperature for one in asking], counts)
    entries["mode"][~keeps_filters] = SEEDED  # not greedy, whose distribution has only the argmax
    entries["temperature"][~keeps_filters] = temperatures[~keeps_filters]
    for name, off in NO_FILTERS.items():
        entries[name][~keeps_filters] = off
    return entries


def _log_probs(
    asking: Sequence[Kept], entries: SamplingArray, logits: Any, sampler: RejectionSampler
) -> dict[int, LogProbs]:
    """Return log probs by index, for requests with tokens. entries: one per token."""
    counts = [len(one.token_ids) for one in asking]
    if not any(counts):
        return {}
    places = np.concatenate([np.arange(count) for count in counts])
    first_rows = np.repeat([one.first_row for one in asking], counts)
    positions = np.repeat([one.request.num_tokens for one in asking], counts)
    num_top = np.repeat([one.request.params.num_top_log_probs for one in asking], counts).astype(np.int32)
    token_ids = np.concatenate([np.asarray(one.token_ids, np.int32) for one in asking])
    asked = TokenRows(first_rows + places, token_ids, (positions + places).astype(np.int32), entries, num_top)
    found = sampler.log_probs(logits, asked)
    ends = np.cumsum(counts)
    return {
        one.index: LogProbs(found.values[end - count : end], found.tops[end - count : end])
        for one, count, end in zip(asking, counts, ends, strict=True)
        if count
    }
