"""Stands in for a TensorRT with plugins: a plugin's outputs are network inputs, computed by plain torch references.

The network around the plugins is a real INetworkDefinition, so its meaning can be interpreted; what cannot be tested
without full TensorRT is add_plugin itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from faser_trtllm.core.decision import PruneRule
from faser_trtllm.ops.cuda.tensors import PagedKv
from faser_trtllm.ops.prune_rows import PruneBatch, kept_rows, prune_rows_reference
from lab.interpreted.interpreter import PluginNode
from lab.reference.cuda.compact_rows import compact_rows_reference
from lab.reference.cuda.early_exit import early_exit_reference
from lab.reference.cuda.verify_attention import verify_attention_reference


class StandInTrt:
    """tensorrt_rtx with `plugin.op.faser`; everything else is the module's."""

    def __init__(self, trt: Any) -> None:
        self._trt = trt
        ops = {name: lambda *inputs, name=name: (name, inputs) for name in REFERENCES}
        self.plugin = SimpleNamespace(op=SimpleNamespace(faser=SimpleNamespace(**ops)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trt, name)


class StandInNetwork:
    """A network with add_plugin. functions: what computes the plugins, by their names; default: REFERENCES."""

    def __init__(
        self, network: Any, num_heads: int, trt: Any, functions: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        self._network = network
        self._functions = REFERENCES if functions is None else functions
        self._num_heads = num_heads
        self._float32 = trt.DataType.FLOAT
        self._nodes: list[_Node] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def add_plugin(self, call: tuple[str, tuple[Any, ...]], aot: bool) -> Any:
        assert aot, "no Python may run at inference"
        op, arguments = call
        inputs = [argument for argument in arguments if not isinstance(argument, int | float)]
        attributes = arguments[len(inputs) :]
        number = len(self._nodes)
        if op == "append_kv":
            caches = inputs[-2:]
            head_dim = caches[0].shape[3]
            declared = [(inputs[0].dtype, (-1, self._num_heads, head_dim))]
            declared += [(cache.dtype, tuple(cache.shape)) for cache in caches]
        elif op == "early_exit":
            i32, scores = inputs[4].dtype, tuple(inputs[4].shape)
            declared = [(self._float32, scores), (i32, scores[:1]), (self._float32, scores[:1])]
        elif op == "prune_rows":
            declared = [(inputs[4].dtype, tuple(inputs[4].shape)), (inputs[6].dtype, tuple(inputs[6].shape))]
        elif op == "compact_rows":
            sizes = [inputs[0], inputs[2], inputs[2], inputs[3], inputs[4]]
            declared = [(tensor.dtype, tuple(tensor.shape)) for tensor in sizes]
        elif op == "verify_attention":
            declared = [(inputs[0].dtype, tuple(inputs[0].shape)), (self._float32, (-1,))]
        else:
            declared = [(inputs[0].dtype, tuple(inputs[0].shape))]
        outputs = [self._network.add_input(f"{op}_{number}_{i}", *item) for i, item in enumerate(declared)]
        function = functools.partial(self._functions[op], **dict(zip(_ATTRIBUTES.get(op, ()), attributes, strict=True)))
        self._nodes.append(_Node(self._network.num_layers, tuple(inputs), outputs, function))
        return SimpleNamespace(name="", get_output=outputs.__getitem__)

    def mark_output(self, tensor: Any) -> None:
        """Mark a network output. Outputs of plugins are inputs here, which TensorRT refuses as outputs: a cache needs
        none, as it is updated in place, and others are copied."""
        if any(tensor is output for node in self._nodes for output in node.tensors):
            if "_cache_out_" in tensor.name:
                return
            name, tensor.name = tensor.name, f"{tensor.name}_of_plugin"
            tensor = self._network.add_shuffle(tensor).get_output(0)  # as it is
            tensor.name = name
        self._network.mark_output(tensor)

    def plugin_nodes(self) -> list[PluginNode]:
        """Return the nodes that an interpreter runs in place of plugins, with the names of the finished network."""
        return [
            PluginNode(
                node.position,
                tuple(tensor.name for tensor in node.inputs),
                tuple(tensor.name for tensor in node.tensors),
                node.function,
            )
            for node in self._nodes
        ]


@dataclass(frozen=True)
class _Node:
    position: int
    inputs: tuple[Any, ...]
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


def verify_attention(q, k_cache, v_cache, block_table, cu_q_lens, kv_lens, split_tokens):
    """Nothing is split."""
    kv = PagedKv(k_cache, v_cache, block_table, cu_q_lens, kv_lens)
    return verify_attention_reference(q, kv), torch.zeros(1)


def verify_attention_combine(whole, workspace, cu_q_lens, kv_lens, **sizes):
    return (whole.clone(),)


def early_exit(hidden, rows, final_norm, lm_head, candidates, drafted_place, rms_norm_eps):
    arrays = (t.float().numpy() if t.is_floating_point() else t.numpy() for t in (hidden, rows, final_norm, lm_head))
    found = early_exit_reference(*arrays, candidates.numpy(), drafted_place.numpy(), rms_norm_eps)
    return tuple(torch.from_numpy(array) for array in found)


def prune_rows(scores, places, before, cu_drafts, starts, rule, positions):
    ranges, weights = cu_drafts.numpy(), PruneRule(before.numpy(), *rule.tolist())
    batch = PruneBatch(starts.numpy(), np.diff(ranges) + 1, scores.numpy(), places.numpy(), positions.shape[0], weights)
    kept = prune_rows_reference(scores.numpy(), batch)
    rows = torch.full_like(positions, -1)
    listed = kept_rows(batch, kept)
    rows[: listed.size] = torch.from_numpy(listed)
    return torch.from_numpy(kept), rows


def compact_rows(hidden, positions, rows, cu_q_lens, kv_lens, max_seq_len):
    arrays = (hidden.float().numpy(), *(tensor.numpy() for tensor in (positions, rows, cu_q_lens, kv_lens)))
    kept_hidden, *found = compact_rows_reference(*arrays, max_seq_len)
    return torch.from_numpy(kept_hidden).to(hidden.dtype), *map(torch.from_numpy, found)


REFERENCES: dict[str, Callable[..., Any]] = {
    "append_kv": append_kv,
    "verify_attention": verify_attention,
    "verify_attention_combine": verify_attention_combine,
    "early_exit": early_exit,
    "prune_rows": prune_rows,
    "compact_rows": compact_rows,
}
_ATTRIBUTES = {
    "early_exit": ("rms_norm_eps",),
    "compact_rows": ("max_seq_len",),
    "verify_attention": ("split_tokens",),
    "verify_attention_combine": ("num_kv_heads", "tokens_per_block", "max_blocks_per_seq", "split_tokens"),
}
