"""One rank's layers: it computes its heads and its columns of every product, and gathers the other ranks' results.

A layer gathers four times: attention's output, the rows after o, the inner rows and the rows after down. Hidden rows
are the same on all ranks, so norms, early exit and compaction need no communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.cuda.decoder import TorchDecoder
from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
from faser_trtllm.engine.cuda.parallel.group import RankGroup
from faser_trtllm.engine.cuda.weights import DeviceWeights
from faser_trtllm.engine.gpu.decoder import Placement
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ShardDecoder(TorchDecoder):
    """Decoder (engine/gpu/decoder.py) over a rank's weights. All ranks run the same passes in the same order."""

    _scales_inner = False

    def __init__(
        self,
        weights: DeviceWeights,
        spec: EngineSpec,
        place: Placement,
        hidden_rows: HiddenRows | None,
        kv_dtype: torch.dtype | None,
        group: RankGroup,
    ) -> None:
        super().__init__(weights, spec, place, hidden_rows, kv_dtype)
        self._group = group

    def early_exit(self, segment: int, num_hidden: int, rows: Tensor, candidates: Tensor, out: Tensor) -> None:
        part = self._group.shard.part(self.weights.sizes["vocab_size"])
        known = (candidates >= part.start) & (candidates < part.stop)
        super().early_exit(segment, num_hidden, rows, (candidates - part.start).where(known, -1), out)
        self._group.maximum(out)  # a rank scores -inf for tokens that it does not have

    def _add_product(
        self, hidden: Tensor, x: Tensor | ScaledRows, weight: Tensor | ScaledRows, bias: Tensor | None
    ) -> ScaledRows | None:
        assert not isinstance(x, ScaledRows), "a row's scale is that of all its columns"
        shard = self._group.shard
        whole = x.new_empty((x.shape[0], shard.size * x.shape[1]))
        self._group.gather(x, whole)
        part = hidden[:, shard.part(hidden.shape[1])].contiguous()
        super()._add_product(part, whole, weight, bias)
        self._group.gather(part, hidden)
        return None

    def _multiply_head(self, x: Tensor, logits: Tensor) -> None:
        part = logits.new_empty((logits.shape[0], logits.shape[1] // self._group.shard.size))
        super()._multiply_head(x, part)
        self._group.gather(part, logits)
