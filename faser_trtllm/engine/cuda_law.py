"""The law that unseeded drafts are drawn from on the device, and the draw.

A draft's law may be any law: the free test makes up for what it lacks, so it is cheap rather than equal to ops/law.py.
top_k and top_p are applied among the 64 likeliest tokens, without sorting the vocabulary. What counts is that the token
is drawn from the very law that is kept for the test, with noise that the test does not use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_MAX_SORTED = 64


@dataclass(frozen=True, slots=True)
class LawParameters:
    """Per request [n]: inv_temperature, top_p, min_p fp32; top_k int32, 0 for none."""

    inv_temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor


def draft_law(logits: Tensor, parameters: LawParameters) -> Tensor:
    """Law [n, vocab_size] fp32 of logits [n, vocab_size] fp32; NaN where a row has NaN or infinity for its maximum."""
    import torch

    largest = logits.amax(-1, keepdim=True)
    weights = ((logits - largest) * parameters.inv_temperature[:, None]).exp()
    num_sorted = min(_MAX_SORTED, logits.shape[1])
    best = weights.topk(num_sorted).values
    place = torch.arange(num_sorted, device=logits.device)
    is_kept = (parameters.top_k[:, None] <= 0) | (place < parameters.top_k[:, None])
    is_cut = (parameters.top_k > 0) & (parameters.top_k <= num_sorted)
    total = torch.where(is_cut, (best * is_kept).sum(-1), weights.sum(-1))
    before = best.cumsum(-1) - best
    is_kept &= before < (parameters.top_p * total)[:, None]
    is_kept[:, 0] = True
    floor = torch.where(is_kept, best, torch.ones_like(best)).amin(-1)
    is_filtered = (parameters.top_k > 0) | (parameters.top_p < 1)
    floor = torch.maximum(torch.where(is_filtered, floor, torch.zeros_like(floor)), parameters.min_p.clamp(max=1.0))
    weights = torch.where(weights >= floor[:, None], weights, torch.zeros_like(weights))
    return weights / weights.sum(-1, keepdim=True)


def draw(law: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each law [n, vocab_size] -> token ids [n] int32, and whether there was a law [n] bool.

    Uses torch's generator of the device, which a replayed graph advances.
    """
    import torch

    sums = law.double().cumsum(-1)
    uniforms = torch.rand((law.shape[0], 1), dtype=torch.float64, device=law.device)
    token = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True).clamp(max=law.shape[1] - 1)
    # Rounding at the very end of the sums must not find a token that the law does not have.
    is_possible = law.gather(1, token) > 0
    token = torch.where(is_possible, token, law.argmax(-1, keepdim=True))
    return token[:, 0].int(), sums[:, -1].isfinite()
