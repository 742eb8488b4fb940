"""The distribution of unseeded drafts on the device, and drawing from it.

The free test is exact for any draft distribution, so this one is made to be cheap rather than equal to ops/probs.py:
top_k and top_p are applied to the 64 most probable tokens, without sorting the vocabulary. The token must be drawn from
exactly the distribution that is kept for the test, with noise that the test does not use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MAX_SORTED = 64


@dataclass(frozen=True, slots=True)
class ProbsParameters:
    """Per request [n]: inv_temperature, top_p, min_p fp32; top_k int32, 0 for none."""

    inv_temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor

    @classmethod
    def of(cls, entries: npt.NDArray[np.void], device: torch.device) -> ProbsParameters:
        """Of entries [n] of a sampling table, copied to the device."""
        import torch

        arrays = (inverse_temperature(entries), entries["top_p"], entries["min_p"], entries["top_k"])
        return cls(*(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays))


def inverse_temperature(entries: npt.NDArray[np.void]) -> npt.NDArray[np.float32]:
    """1 / temperature [n] of entries [n] of a sampling table, at most the largest float."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / entries["temperature"]
    found: npt.NDArray[np.float32] = np.minimum(inverse, np.finfo(np.float32).max).astype(np.float32)
    return found


def filtered_probs(logits: Tensor, parameters: ProbsParameters) -> Tensor:
    """Probabilities [n, vocab_size] fp32 of logits [n, vocab_size] fp32; NaN where a row's maximum is not finite."""
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


def log_probs(logits: Tensor, token_ids: Tensor, is_greedy: Tensor, parameters: ProbsParameters) -> Tensor:
    """Log probabilities [n] fp64 of token_ids [n] under logits [n, vocab_size] fp32, filtered as ops/probs.py does.

    is_greedy [n] bool: all probability is at the argmax. Sorts the vocabulary, so it is for the few who ask.
    """
    import torch

    weights = ((logits - logits.amax(-1, keepdim=True)).double() * parameters.inv_temperature[:, None]).exp()
    kept, ids = weights.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(logits.shape[1], device=logits.device)
    kept = kept * ((parameters.top_k[:, None] <= 0) | (place < parameters.top_k[:, None]))
    reached = (kept.cumsum(-1) - kept) < parameters.top_p[:, None].double() * kept.sum(-1, keepdim=True)
    kept = kept * (reached | (parameters.top_p[:, None] >= 1)) * (kept >= parameters.min_p[:, None])
    probs = (kept / kept.sum(-1, keepdim=True)).log()
    is_asked = ids == token_ids[:, None].long()
    found = torch.where(is_asked, probs, -torch.inf).amax(-1)
    is_best = ids[:, 0] == token_ids.long()
    return torch.where(is_greedy, torch.where(is_best, 0.0, -torch.inf).double(), found)


def draw(probs: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token from each row of probs [n, vocab_size] -> token ids [n] int32, whether the row is valid [n] bool.

    Uses torch's device generator, which a replayed graph advances.
    """
    import torch

    sums = probs.double().cumsum(-1)
    uniforms = torch.rand((probs.shape[0], 1), dtype=torch.float64, device=probs.device)
    token = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True).clamp(max=probs.shape[1] - 1)
    # Rounding at the end of the sums must not select a token of probability 0.
    is_possible = probs.gather(1, token) > 0
    token = torch.where(is_possible, token, probs.argmax(-1, keepdim=True))
    return token[:, 0].int(), sums[:, -1].isfinite()
