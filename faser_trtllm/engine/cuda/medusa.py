"""Medusa heads in device memory, over the hidden rows that their target keeps there.

Head i, from 1 on, drafts the i-th token after the last committed one. It reads the hidden row of the position before
that token, after the target's final norm, like the CPU engine (plugins/cpu/engine/medusa.cpp). No distribution depends
on a draft, so one pass computes the logits of all places and reads each head once; a step only moves to the next place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from faser_trtllm.builder.cuda_engine_file import CudaFile, tensor_shapes
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
from faser_trtllm.engine.cuda.weights import device_tensor
from faser_trtllm.engine.gpu.batch import DeviceBatch
from faser_trtllm.engine.gpu.decoder import Bounds, OneSegmentDecoder, Placement

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """Tensors by their names in the engine file, such as medusa.0.lm_head. sizes: the file's `model` object."""

    sizes: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def load(cls, file: CudaFile, device: torch.device, dtype: torch.dtype | None = None) -> MedusaWeights:
        """Copy the tensors to the device. dtype: replaces the file's, in tests."""
        names = tensor_shapes(file.model)
        return cls(file.model, {name: device_tensor(file, name, device, dtype) for name in names})

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class MedusaDecoder(OneSegmentDecoder):
    """Decoder (engine/gpu/decoder.py) without layers and KV."""

    has_kv = False

    def __init__(self, weights: MedusaWeights, spec: EngineSpec, place: Placement, hidden_rows: HiddenRows) -> None:
        """hidden_rows: outputs of the target's last layer."""
        import torch

        runtime = place.runtime
        self.weights = weights
        self._ops = place.ops
        self._read = hidden_rows
        medusa: Mapping[str, int] = weights.sizes["medusa"]
        self._num_heads, self._num_layers = medusa["num_heads"], medusa["num_layers"]
        self._max_batch_size, self._max_seq_len = spec.max_batch_size, spec.max_seq_len
        runtime.wait()  # other streams do not wait for the default stream, which may still copy weights
        with runtime.on(place.partition):
            self.batch = DeviceBatch(runtime, spec, token_rows=hidden_rows.rows_before)
            # Rows by place and request, then a row of -inf for places without a head, which ends a request's drafting.
            shape = (self._num_heads * spec.max_batch_size + 1, spec.vocab_size)
            self._logits = torch.full(shape, -math.inf, dtype=torch.float32, device=runtime.device)
            self._first = torch.arange(spec.max_batch_size, dtype=torch.int64, device=runtime.device)
            self._at = self._first.clone()  # row of each request's current place
            self._hidden = torch.zeros((spec.max_num_tokens, 1), dtype=torch.float32, device=runtime.device)

    @property
    def weight_bytes(self) -> int:
        return self.weights.num_bytes

    def run(self, rows: int, first: int, last: int, bounds: Bounds) -> None:
        """Do nothing: only rows with logits have an effect."""

    def write_logits(self, logits: Tensor) -> None:
        """See Decoder.write_logits. Only the first max_batch_size rows get logits, since no more requests draft."""
        import torch

        tensors, sizes = self.weights.tensors, self.weights.sizes
        count = min(logits.shape[0], self._max_batch_size)
        kept_rows = self.batch.token_rows.index_select(0, self.batch.logit_rows[:count])
        kept = self._read.tensor.index_select(0, kept_rows)
        normed = self._ops.rms_norm(kept, tensors["final_norm"], sizes["rms_norm_eps"])
        for head in range(self._num_heads):
            x = normed
            for layer in range(self._num_layers):
                product = self._ops.linear(x, tensors[f"medusa.{head}.residual.{layer}"])
                product += tensors[f"medusa.{head}.residual_bias.{layer}"]
                x = x + torch.nn.functional.silu(product).to(x.dtype)
            start = head * self._max_batch_size
            self._ops.logits(x, tensors[f"medusa.{head}.lm_head"], self._logits[start : start + count])
        self._at.copy_(self._first)
        self._take_place(logits[:count])

    def step(self, rows: int, bounds: Bounds, logits: Tensor) -> None:
        """See Decoder.step. Requests with a row move to the next place; the others stay at theirs."""
        has_row = self.batch.kv_lens[:rows] > 0
        self._at[:rows] += has_row * self._max_batch_size
        self._take_place(logits)

    def close(self) -> None:
        del self.batch, self.weights, self._read, self._logits, self._first, self._at, self._hidden

    def _take_place(self, out: Tensor) -> None:
        import torch

        rows = self._at[: out.shape[0]].clamp(max=self._logits.shape[0] - 1)
        torch.index_select(self._logits, 0, rows, out=out)
