"""A model's weights in device memory, shared by all partitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from faser_trtllm.builder.cuda_engine_file import MXFP4_SUFFIX, CudaFile, tensor_shapes
from faser_trtllm.builder.shard import Shard
from faser_trtllm.config import Quantization
from faser_trtllm.engine.gpu.fp8 import check_matrix
from faser_trtllm.ops.cuda.experts.grouped_matmul import Mxfp4Matrices
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows, quantize_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor


WHOLE = Shard()
MATRICES = ("qkv", "o", "gate_up", "down")
"""The layer matrices that quantization applies to."""


def folded_norms(sizes: Mapping[str, Any]) -> Mapping[str, str]:
    """Return, by matrix, the RMSNorm whose weights are multiplied into it: (x w) W = x (w W), rounded once. The reader
    of the product applies the row's scale. A mixture keeps a norm for its router, whose logits choose experts."""
    if "block" in sizes:
        return {}
    return {"qkv": "input_norm"} | ({} if "experts" in sizes else {"gate_up": "post_norm"})


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices [out, in]; None for tensors that the model lacks. qkv and gate_up are fused along out and contain the
    norm before them (folded_norms), except in block drafters. A mixture has gate_up and down [num_experts, out, in], a
    separate post_norm, and a router [num_experts, in] with the shared expert's gate as a further row; its gate_up_bias
    and down_bias are [num_experts, out]. sinks: fp32 [num_heads]."""

    qkv: Tensor | ScaledRows
    o: Tensor | ScaledRows
    gate_up: Tensor | ScaledRows | Mxfp4Matrices
    down: Tensor | ScaledRows | Mxfp4Matrices
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    input_norm: Tensor | None = None
    post_norm: Tensor | None = None
    router: Tensor | None = None
    router_bias: Tensor | None = None
    sinks: Tensor | None = None
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None
    attention_conv_base: Tensor | None = None
    attention_conv_delta: Tensor | None = None
    mlp_conv_base: Tensor | None = None
    mlp_conv_delta: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of an EAGLE-3 head in addition to its layers."""

    fc: Tensor  # [hidden, num_features]
    input_norm: Tensor  # [hidden], of the embedding
    hidden_norm: Tensor  # [hidden], of fc's product
    fc_bias: Tensor | None = None
    fc_norm: Tensor | None = None  # [num_features], of fc's input, in num_fc_norms parts
    target_ids: Tensor | None = None  # int64 [draft_vocab_size], the token of each LM head output; None: all tokens


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The weights of an MTP layer in addition to a decoder's; norms are [hidden]."""

    input_proj: Tensor  # [hidden, 2 * hidden], of the normed hidden row and then the normed embedding
    token_norm: Tensor
    hidden_norm: Tensor
    target_norm: Tensor | None = None  # the target's final norm, if the layer reads rows after it


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """The weights of a block drafter in addition to its layers."""

    fc: Tensor  # [hidden, num_features]
    hidden_norm: Tensor  # [hidden], of fc's product
    markov_in: Tensor | None = None  # [vocab_size, rank], like markov_out; of a Markov head
    markov_out: Tensor | None = None
    predecessors: Tensor | None = None  # [vocab_size, rank], like successors; of a selector
    successors: Tensor | None = None
    selector_proj: Tensor | None = None  # [rank, hidden]


Head = HeadWeights | MtpWeights | BlockWeights


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """All weights of an engine file, or of one rank."""

    sizes: Mapping[str, Any]  # the `model` object of the engine file, or a rank's (builder/shard.py)
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor
    cos: Tensor  # fp32 [max_seq_len, head_dim / 2], like sin; a block drafter has block_size - 1 positions more
    sin: Tensor
    head: Head | None = None
    output_ids: Tensor | None = None  # int64 [num_outputs], the token of each LM head output; None: all tokens

    @classmethod
    def load(
        cls,
        file: CudaFile,
        device: torch.device,
        dtype: torch.dtype | None = None,
        quantization: Quantization = Quantization.NONE,
        shard: Shard = WHOLE,
    ) -> DeviceWeights:
        """Copy a file's tensors to the device one by one, and quantize each matrix as soon as it is there.

        shard: the rank's part. dtype: replaces the file's, in tests. Raises ConfigError if quantizing fails.
        """
        import torch

        sizes = shard.sizes(file.model)
        block, folded = sizes.get("block"), folded_norms(sizes)
        tensors: dict[str, Tensor] = {}
        layers: list[dict[str, Any]] = [{} for _ in range(sizes["num_layers"])]
        for name in tensor_shapes(file.model):
            tensor = device_tensor(file, name, device, dtype, shard)
            if not name.startswith("layers."):
                tensors[name] = tensor
                continue
            _, index, part = name.split(".")
            layer = layers[int(index)]
            if folded.get(part) in layer:
                tensor.mul_(layer.pop(folded[part]))  # the norm precedes the matrix in the file
            if part in MATRICES and quantization is Quantization.FP8:
                check_matrix(name, tuple(tensor.shape), file.dtype)
                layer[part] = quantize_rows(tensor)
            elif part.endswith(MXFP4_SUFFIX):
                layer[part] = _mxfp4_matrices(tensor, sizes["experts"]["num_experts"])
            else:
                layer[part] = tensor.float() if part == "sinks" else tensor
        # Computed on the host as the CPU engine's tables are: a GPU's cos and sin differ in the last bits.
        num_positions = sizes["max_seq_len"] + (0 if block is None else block["block_size"] - 1)
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, tensors["rope_inv_freq"].cpu())
        factor = sizes["rope_attention_factor"]
        return cls(
            sizes,
            tensors["embedding"],
            tuple(LayerWeights(**_stack_experts(layer, sizes.get("experts"))) for layer in layers),
            tensors["final_norm"],
            tensors["embedding"][shard.part(sizes["vocab_size"])] if sizes["tied"] else tensors["lm_head"],
            (angles.cos() * factor).to(device),
            (angles.sin() * factor).to(device),
            _head_weights(tensors),
            tensors.get("output_ids"),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in device memory; a tied embedding counts once."""
        import torch

        own: list[Tensor | ScaledRows | Mxfp4Matrices] = [self.embedding, self.final_norm, self.cos, self.sin]
        own += [] if self.sizes["tied"] else [self.lm_head]
        own += [] if self.output_ids is None else [self.output_ids]
        parts: list[LayerWeights | Head] = [*self.layers, *([] if self.head is None else [self.head])]
        for part in parts:
            own += [tensor for name in part.__slots__ if (tensor := getattr(part, name)) is not None]
        return sum(
            held.numel() * held.element_size() if isinstance(held, torch.Tensor) else held.num_bytes for held in own
        )


def _stack_experts(layer: Mapping[str, Any], experts: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a layer's tensors by the names of LayerWeights; the file stacks experts along the first dimension."""
    import torch

    if experts is None:
        return layer
    named = dict(layer)
    for name in ("gate_up", "down"):
        packed = named.pop(f"expert_{name}{MXFP4_SUFFIX}", None)
        if packed is None:
            matrices = named.pop(f"expert_{name}")
            packed = matrices.view(experts["num_experts"], -1, matrices.shape[1])
        named[name] = packed
        if experts["has_bias"]:
            named[f"{name}_bias"] = named.pop(f"expert_{name}_bias").view(experts["num_experts"], -1)
    if experts["shared_size"]:
        named["router"] = torch.cat((named["router"], named.pop("shared_gate")))
    return named


def _mxfp4_matrices(rows: Tensor, num_experts: int) -> Mxfp4Matrices:
    """Split rows of the file (MXFP4_SUFFIX) into numbers and scales."""
    num_numbers = rows.shape[1] // 17 * 16
    parts = (rows[:, :num_numbers], rows[:, num_numbers:])
    return Mxfp4Matrices(*(part.contiguous().view(num_experts, -1, part.shape[1]) for part in parts))


def _head_weights(tensors: Mapping[str, Tensor]) -> Head | None:
    """Return the draft head among tensors that belong to no layer, given by their names in the engine file."""
    head, block = (
        {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)}
        for kind in ("head.", "block.")
    )
    if block:
        return BlockWeights(**block)
    if not head:
        return None
    return MtpWeights(**head) if "input_proj" in head else HeadWeights(**head)


def device_tensor(
    file: CudaFile, name: str, device: torch.device, dtype: torch.dtype | None = None, shard: Shard = WHOLE
) -> Tensor:
    """Return a file's tensor, or a rank's rows of it, on the device. dtype: replaces the file's main type."""
    import torch

    array, kind = file.array(name)
    rows = np.concatenate([array[part] for part in shard.rows(name, len(array), file.model)])  # a copy that torch owns
    tensor = torch.from_numpy(rows).view(getattr(torch, kind))
    return tensor.to(device) if kind != file.dtype else tensor.to(device, dtype or tensor.dtype)
