"""Log probabilities on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.request import NO_TOP
from faser_trtllm.ops.log_probs import LogProbs, TokenRows

if TYPE_CHECKING:
    from torch import Tensor


def log_probs(logits: Tensor, asked: TokenRows) -> LogProbs:
    """Return ops.log_probs.token_log_probs() of unedited logits [n, vocab_size] fp32, with the filters of ops/probs.py.
    Sorts the vocabulary, since few requests ask for log probs."""
    import torch

    def column(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(logits.device)[:, None]

    entries, num_top = asked.sampling, min(int(asked.num_top.max(initial=0)), logits.shape[1])
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.minimum(np.float32(1) / entries["temperature"], np.finfo(np.float32).max).astype(np.float32)
    top_k, top_p, min_p = (column(entries[name]) for name in ("top_k", "top_p", "min_p"))
    weights = ((logits - logits.amax(-1, keepdim=True)).double() * column(inverse)).exp()
    kept, ids = weights.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(logits.shape[1], device=logits.device)
    kept = kept * ((top_k <= 0) | (place < top_k))
    reached = (kept.cumsum(-1) - kept) < top_p.double() * kept.sum(-1, keepdim=True)
    kept = kept * (reached | (top_p >= 1)) * (kept >= min_p)
    probs = (kept / kept.sum(-1, keepdim=True)).log()
    certain = torch.where(place == 0, 0.0, -torch.inf).double()
    probs = torch.where(column(entries["mode"] == native.GREEDY), certain, probs)
    found = torch.where(ids == column(asked.token_ids).long(), probs, -torch.inf).amax(-1)
    best, logs = ids[:, :num_top].int().cpu().numpy(), probs[:, :num_top].contiguous().cpu().numpy()
    tops = [
        (best[i, :num].copy(), logs[i, :num].copy()) if num else NO_TOP  # kept after the pass, which `best` is not
        for i, num in enumerate(asked.num_top.tolist())
    ]
    return LogProbs(found.cpu().numpy(), tops)
