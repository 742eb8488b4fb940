"""A block drafter's logits that depend on the previous draft: DSpark's Markov head and DFlash2's selector."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from faser_trtllm.engine.cuda.weights import BlockWeights
from faser_trtllm.engine.gpu.ops import Ops

if TYPE_CHECKING:
    from torch import Tensor


class BlockChain:
    """Logits of all places of the drafted blocks, one row each, and a last row of -inf, which ends drafting.

    A Markov head adds logits that depend on the previous token. A selector keeps the best tokens of a row and adds to
    each a score that depends on the previous token.
    """

    def __init__(self, ops: Ops, weights: BlockWeights, block: dict[str, Any], num_rows: int, lm_head: Tensor) -> None:
        """block: the `block` object of the engine file's header. num_rows: the number of places."""
        import torch

        self._ops, self._weights, self._block, self._lm_head = ops, weights, block, lm_head
        shape, device = (num_rows + 1, lm_head.shape[0]), lm_head.device
        self._logits = torch.full(shape, -math.inf, dtype=torch.float32, device=device)
        if weights.selector_proj is not None:
            shape = (num_rows + 1, block["selector_top_k"])
            self._best = torch.zeros(shape, dtype=torch.int64, device=device)
            self._scores = torch.full(shape, -math.inf, dtype=torch.float32, device=device)
            shape = (num_rows + 1, block["selector_rank"])
            self._states = torch.zeros(shape, dtype=torch.float32, device=device)

    @property
    def last(self) -> int:
        """The index of the row of -inf."""
        return self._logits.shape[0] - 1

    def fill(self, rows: Tensor) -> None:
        """Compute the logits of the first n rows from `rows` [n, hidden], which are after the final norm; this reads
        the LM head once."""
        import torch

        block, mask, count = self._block, self._block["mask_token_id"], rows.shape[0]
        logits = self._logits[:count]
        self._ops.logits(rows, self._lm_head, logits)
        logits[:, mask] = -math.inf
        best = None if self._weights.selector_proj is None else logits.topk(block["selector_top_k"]).indices
        if block["logit_scale"] != 1.0:
            logits *= block["logit_scale"]
        if cap := block["logit_softcap"]:
            torch.tanh(logits.div_(cap), out=logits).mul_(cap)
            logits[:, mask] = -math.inf
        if best is not None and self._weights.selector_proj is not None:
            self._best[:count].copy_(best)
            torch.gather(logits, 1, best, out=self._scores[:count])
            self._states[:count].copy_(self._ops.linear(rows, self._weights.selector_proj))

    def take(self, rows: Tensor, before: Tensor, out: Tensor) -> None:
        """Write the logits of `rows` int64 [n] to `out` fp32 [n, vocab_size]; before int32 [n]: the previous tokens."""
        import torch

        weights = self._weights
        if weights.predecessors is not None and weights.successors is not None:
            best, rank = self._best.index_select(0, rows), self._states.shape[1]
            states = self._states.index_select(0, rows) * weights.predecessors.index_select(0, before)
            successors = weights.successors.index_select(0, best.view(-1)).view(*best.shape, rank)
            scores = self._scores.index_select(0, rows) + (states[:, None] * successors).sum(-1)
            out.fill_(-math.inf).scatter_(1, best, scores)
            return
        torch.index_select(self._logits, 0, rows, out=out)
        if weights.markov_in is not None and weights.markov_out is not None:
            added = torch.empty_like(out)
            self._ops.logits(weights.markov_in.index_select(0, before), weights.markov_out, added)
            out += added
