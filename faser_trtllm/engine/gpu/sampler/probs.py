"""Log probabilities on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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


def log_probs(
    logits: Tensor, token_ids: Tensor, is_greedy: Tensor, parameters: ProbsParameters, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities [n] fp64 of token_ids [n] under logits [n, vocab_size] fp32, filtered as ops/probs.py does, and
    the num_top most probable tokens: ids int32 and log probabilities, each [n, num_top].

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
    certain = torch.where(place == 0, 0.0, -torch.inf).double()
    probs = torch.where(is_greedy[:, None], certain, probs)
    found = torch.where(is_asked, probs, -torch.inf).amax(-1)
    return found, ids[:, :num_top].int(), probs[:, :num_top].contiguous()
