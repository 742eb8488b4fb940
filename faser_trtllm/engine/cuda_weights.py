"""A model's weights in device memory, once for all partitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from faser_trtllm.builder.cuda_engine_file import CudaFile, tensor_shapes

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices [out, in]; qkv and gate_up are fused along out. None: the model has no such bias or norm."""

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """sizes: the `model` object of the engine file. cos, sin: fp32 [max_seq_len, head_dim / 2]."""

    sizes: Mapping[str, Any]
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def load(cls, file: CudaFile, device: torch.device, dtype: torch.dtype | None = None) -> DeviceWeights:
        """Copy a file's tensors to the device, tensor by tensor. dtype: another one than the file's, for tests."""
        import torch

        sizes = file.model
        wanted = getattr(torch, file.dtype) if dtype is None else dtype
        tensors: dict[str, Tensor] = {}
        for name in tensor_shapes(sizes):
            data, shape, kind = file.bytes_of(name)
            # A bytearray, since torch warns of read-only memory; it lives until the copy is made.
            tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, kind)).reshape(shape)
            tensors[name] = tensor.to(device) if name == "rope_inv_freq" else tensor.to(device, wanted)
        layers: list[dict[str, Tensor]] = [{} for _ in range(sizes["num_layers"])]
        for name, tensor in tensors.items():
            if name.startswith("layers."):
                _, index, part = name.split(".")
                layers[int(index)][part] = tensor
        # On the host, as the CPU engine's tables: a GPU's cos and sin have other last bits.
        positions = torch.arange(sizes["max_seq_len"], dtype=torch.float32)
        angles = torch.outer(positions, tensors["rope_inv_freq"].cpu())
        factor = sizes["rope_attention_factor"]
        return cls(
            sizes,
            tensors["embedding"],
            tuple(LayerWeights(**layer) for layer in layers),
            tensors["final_norm"],
            tensors.get("lm_head", tensors["embedding"]),
            (angles.cos() * factor).to(device),
            (angles.sin() * factor).to(device),
        )

    @property
    def num_bytes(self) -> int:
        """Device memory of the weights; a tied embedding counts once."""
        own = [self.embedding, self.final_norm, self.cos, self.sin]
        own += [] if self.lm_head is self.embedding else [self.lm_head]
        for layer in self.layers:
            own += [tensor for name in LayerWeights.__slots__ if (tensor := getattr(layer, name)) is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in own)
