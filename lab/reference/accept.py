"""References of ops/accept.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.ops.accept import AcceptResult, Outcome
from faser_trtllm.ops.arrays import (
    Float32Array,
    Int32Array,
    SamplingArray,
    int32_at,
)
from faser_trtllm.ops.philox import Stream
from faser_trtllm.ops.probs import RowStatus
from lab.reference.acceptance import is_certain
from lab.reference.draw import draw_token, gumbel_max_token, residual
from lab.reference.philox import uniform
from lab.reference.probs import next_token_probs_reference
from lab.reference.sample import Uniform, draft_probs_row


def accept_reference(
    sampling: SamplingArray,
    slots: Int32Array,
    logits: Float32Array,
    vocab_size: int,
    cu_logit_rows: Int32Array,
    num_tokens: Int32Array,
    num_drafts: Int32Array,
    max_draft_len: int,
    *,
    uniform: Uniform = uniform,
) -> AcceptResult:
    """Compute accept() in numpy; `uniform` can be replaced to enumerate the randomness."""
    n = slots.size
    result = AcceptResult.over(np.zeros(n * (max_draft_len + 5), np.int32), n, max_draft_len)
    for i, slot in enumerate(slots.tolist()):
        entry = sampling[slot]
        result.outcome[i] = Outcome.STILL_PENDING
        for row in range(int(cu_logit_rows[i + 1] - cu_logit_rows[i])):
            position = int(num_tokens[i]) + row
            has_draft = row < int(num_drafts[i])
            draft = int(int32_at(int(entry["tokens"]), position + 1)[position]) if has_draft else -1
            p = np.empty(vocab_size, np.float32)
            row_logits = logits[cu_logit_rows[i] + row, :vocab_size]
            status = next_token_probs_reference(sampling, slot, row_logits, position, p)
            if status is not RowStatus.OK:
                result.row_status[i] = status
                result.outcome[i] = Outcome.FAILED
                break
            certain = has_draft and is_certain(entry, position)
            token, accepted = _test(entry, p, position, draft, max_draft_len, uniform, certain)
            if has_draft:
                source = native.BY_SUFFIX if certain else native.BY_MODEL
                entry["num_tested"][source] += 1
                entry["num_passed"][source] += accepted
            result.token_ids[i, row] = token
            result.num_tokens[i] += 1
            if not accepted:
                result.outcome[i] = Outcome.RECOVERED if has_draft else Outcome.BONUS
                break
            result.num_accepted[i] += 1
    return result


def _test(
    entry: np.void,
    p: npt.NDArray[np.float32],
    position: int,
    draft: int,
    max_draft_len: int,
    uniform: Uniform,
    certain: bool,
) -> tuple[int, bool]:
    """Return the token committed at this position, and whether it is the draft (-1: no draft is pending).

    certain: the draft was not drawn, so its q is 1 at that token.
    """
    key = int(entry["key"])
    if entry["mode"] == native.GREEDY:
        token = int(np.argmax(p))
        return token, token == draft
    if entry["mode"] == native.SEEDED:
        token = gumbel_max_token(p, key, position)
        return token, token == draft
    if draft < 0 or certain:
        token = draw_token(p, uniform(key, position, Stream.BONUS))
        return token, token == draft
    q = draft_probs_row(entry, position, p.size, max_draft_len)
    if uniform(key, position, Stream.TEST) * float(q[draft]) < float(p[draft]):
        return draft, True
    u = uniform(key, position, Stream.RECOVER)
    token = draw_token(residual(p, q), u)
    return (token if token >= 0 else draw_token(p, u)), False
