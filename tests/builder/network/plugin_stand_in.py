"""Stands in for a TensorRT with plugins: a plugin's outputs are network inputs, computed by plain torch references.

The network around the plugins is a real INetworkDefinition, so its meaning can be interpreted; what cannot be tested
without full TensorRT is add_plugin itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from faser_trtllm.engine.interpreter import PluginNode


class StandInTrt:
    """tensorrt_rtx with `plugin.op.faser`; everything else is the module's."""

    def __init__(self, trt: Any) -> None:
        self._trt = trt
        ops = {name: lambda *inputs, name=name: (name, inputs) for name in ("append_kv", "verify_attention")}
        self.plugin = SimpleNamespace(op=SimpleNamespace(faser=SimpleNamespace(**ops)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trt, name)


class StandInNetwork:
    """A network with add_plugin."""

    def __init__(self, network: Any, num_heads: int) -> None:
        self._network = network
        self._num_heads = num_heads
        self._nodes: list[_Node] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def add_plugin(self, call: tuple[str, tuple[Any, ...]], aot: bool) -> Any:
        assert aot, "no Python may run at inference"
        op, inputs = call
        number = len(self._nodes)
        if op == "append_kv":
            caches = inputs[-2:]
            head_dim = caches[0].shape[3]
            declared = [(inputs[0].dtype, (-1, self._num_heads, head_dim))]
            declared += [(cache.dtype, tuple(cache.shape)) for cache in caches]
        else:
            declared = [(inputs[0].dtype, tuple(inputs[0].shape))]
        outputs = [self._network.add_input(f"{op}_{number}_{i}", *item) for i, item in enumerate(declared)]
        names = [tensor.name for tensor in inputs]
        self._nodes.append(_Node(self._network.num_layers, tuple(names), outputs, _FUNCTIONS[op]))
        return SimpleNamespace(name="", get_output=outputs.__getitem__)

    def mark_output(self, tensor: Any) -> None:
        """Caches come out of plugins, which are inputs here: TensorRT would refuse them as outputs."""
        if not any(tensor is output for node in self._nodes for output in node.tensors):
            self._network.mark_output(tensor)

    def plugin_nodes(self) -> list[PluginNode]:
        """What an interpreter runs where the plugins are, by the names of the finished network."""
        return [
            PluginNode(node.position, node.inputs, tuple(tensor.name for tensor in node.tensors), node.function)
            for node in self._nodes
        ]


@dataclass(frozen=True)
class _Node:
    position: int
    inputs: tuple[str, ...]
    tensors: list[Any]  # they are renamed when they become outputs
    function: Callable[..., Any]


def append_kv(qkv, cos, sin, positions, cu_q_lens, block_table, kv_lens, k_cache, v_cache):
    """Rotate q and k (half-split) and write the new keys and values into their blocks, one row at a time."""
    num_kv_heads, tokens_per_block, head_dim = k_cache.shape[1:]
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], 1)

    def rotate(x):
        c, s = cos[positions.long()].unsqueeze(1), sin[positions.long()].unsqueeze(1)
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * c - second * s, second * c + first * s], -1).to(x.dtype)

    k = rotate(k)
    for b in range(len(kv_lens)):
        for row in range(int(cu_q_lens[b]), int(cu_q_lens[b + 1])):
            block, offset = divmod(int(positions[row]), tokens_per_block)
            block = int(block_table[b, block])
            k_cache[block, :, offset], v_cache[block, :, offset] = k[row], v[row]
    return rotate(q), k_cache, v_cache


def verify_attention(q, k_cache, v_cache, block_table, cu_q_lens, kv_lens):
    """Row i of n of request b sees the first kv_lens[b] - n + i + 1 keys of its blocks."""
    out = torch.full_like(q, float("nan"))
    group = q.shape[1] // k_cache.shape[1]
    for b in range(len(kv_lens)):
        rows = range(int(cu_q_lens[b]), int(cu_q_lens[b + 1]))
        k, v = (
            cache[block_table[b].long()].transpose(1, 2).flatten(0, 1).repeat_interleave(group, 1).float()
            for cache in (k_cache, v_cache)
        )
        for i, row in enumerate(rows):
            end = int(kv_lens[b]) - len(rows) + i + 1
            scores = torch.einsum("hd,khd->hk", q[row].float(), k[:end]) * q.shape[2] ** -0.5
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[:end]).to(q.dtype)
    return (out,)


_FUNCTIONS = {"append_kv": append_kv, "verify_attention": verify_attention}
