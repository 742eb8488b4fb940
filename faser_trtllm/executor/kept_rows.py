"""What requests ask to keep of the rows behind their tokens: log probabilities and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from faser_trtllm.core.plan import KeptRows
from faser_trtllm.core.request import Request
from faser_trtllm.native import SEEDED
from faser_trtllm.ops.arrays import SamplingArray
from faser_trtllm.ops.log_probs import TokenRows
from faser_trtllm.sampling.synthetic_accept import Tester


@dataclass(frozen=True, slots=True)
class Kept:
    """A request that keeps rows; its committed tokens come from the rows of logits that begin with first_row."""

    index: int
    request: Request
    first_row: int
    token_ids: Sequence[int]


def keep_rows(
    keeping: Sequence[Kept], sampling: SamplingArray, logits: Any, vocab_size: int, tester: Tester
) -> dict[int, KeptRows]:
    """By index. logits [num_rows, >= vocab_size], as the tester takes them."""
    log_probs = _log_probs([one for one in keeping if one.request.params.return_log_probs], sampling, logits, tester)
    found = {}
    for one in keeping:
        rows: Any = ()
        if one.request.params.return_generation_logits:
            end = one.first_row + len(one.token_ids)
            rows = [row.copy() for row in logits[one.first_row : end, :vocab_size]]
        found[one.index] = KeptRows(log_probs.get(one.index, []), rows)
    return found


def _log_probs(asking: Sequence[Kept], sampling: SamplingArray, logits: Any, tester: Tester) -> dict[int, list[float]]:
    counts = [len(one.token_ids) for one in asking]
    if not any(counts):
        return {}
    entries = np.repeat(sampling[[one.request.slot for one in asking]], counts)
    keeps_filters = np.repeat([one.request.params.normalize_log_probs for one in asking], counts)
    temperatures = np.repeat([one.request.params.log_prob_temperature for one in asking], counts)
    entries["mode"][~keeps_filters] = SEEDED  # any but greedy, whose distribution is all at the argmax
    entries["temperature"][~keeps_filters] = temperatures[~keeps_filters]
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        entries[name][~keeps_filters] = off
    places = np.concatenate([np.arange(count) for count in counts])
    first_rows = np.repeat([one.first_row for one in asking], counts)
    positions = np.repeat([one.request.num_tokens for one in asking], counts)
    token_ids = np.concatenate([np.asarray(one.token_ids, np.int32) for one in asking])
    asked = TokenRows(first_rows + places, token_ids, (positions + places).astype(np.int32), entries)
    found = np.split(tester.log_probs(logits, asked), np.cumsum(counts)[:-1])
    return {one.index: values.tolist() for one, values in zip(asking, found, strict=True)}
