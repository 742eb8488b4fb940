"""List the tensors of an engine, where q, k and v are stacked to one matrix, and gate and up to another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]
Part = tuple[str, Shape]
"""A tensor of a checkpoint: its name and its shape."""


def fused_tensors(sizes: Mapping[str, Any]) -> dict[str, tuple[Part, ...]]:
    """Return, for every tensor of an engine file in its order, the checkpoint's tensors that are stacked into it.

    sizes: the `model` object of an engine file's header. Missing qkv_bias, o_bias, mlp_bias, qk_norm and fc_bias count
    as set. Its optional members are
    - head: an EAGLE-3 head, whose first qkv reads the normed embedding and the normed hidden row, whose fc follows
      num_fc_norms norms, and whose LM head has draft_vocab_size tokens; or with is_mtp an MTP layer: a decoder layer
      after head.input_proj;
    - block: a block drafter (models/heads/block.py);
    - experts: a router and experts (models/experts.py) instead of gate_up and down; expert_gate_up stacks the experts;
    - num_outputs: tokens of an LM head that has fewer than vocab_size.
    """
    hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
    head: Mapping[str, Any] | None = sizes.get("head")
    is_eagle3 = head is not None and not head.get("is_mtp")
    embedding = "model.embed_tokens.weight"
    found: dict[str, tuple[Part, ...]] = {"embedding": ((embedding, (vocab, hidden)),)}
    for i in range(sizes["num_layers"]):
        layer = _layer(sizes, f"model.layers.{i}", 2 * hidden if is_eagle3 and i == 0 else hidden)
        found |= {f"layers.{i}.{name}": parts for name, parts in layer.items()}
    found["final_norm"] = (("model.norm.weight", (hidden,)),)
    num_outputs = sizes.get("num_outputs", vocab) if head is None else head["draft_vocab_size"]
    found["lm_head"] = ((embedding if sizes["tied"] else "lm_head.weight", (num_outputs, hidden)),)
    if head is not None and is_eagle3:
        found["head.fc"] = (("fc.weight", (hidden, head["num_features"])),)
        if count := head.get("num_fc_norms", 0):
            size = head["num_features"] // count
            found["head.fc_norm"] = tuple((f"fc_norm.{i}.weight", (size,)) for i in range(count))
        if head.get("fc_bias", True):
            found["head.fc_bias"] = (("fc.bias", (hidden,)),)
        found["head.hidden_norm"] = (("model.layers.0.hidden_norm.weight", (hidden,)),)
    elif head is not None:
        found["head.input_proj"] = (("input_proj.weight", (hidden, 2 * hidden)),)
        found["head.token_norm"] = (("token_layernorm.weight", (hidden,)),)
        found["head.hidden_norm"] = (("hidden_layernorm.weight", (hidden,)),)
    return found | _block(sizes)


def _block(sizes: Mapping[str, Any]) -> dict[str, tuple[Part, ...]]:
    """Return the tensors that only block drafters have; {} for other models."""
    block: Mapping[str, Any] = sizes.get("block", {})
    if not block:
        return {}
    hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
    found: dict[str, tuple[Part, ...]] = {
        "block.fc": (("fc.weight", (hidden, block["num_features"])),),
        "block.hidden_norm": (("hidden_norm.weight", (hidden,)),),
    }
    if rank := block["markov_rank"]:
        found["block.markov_in"] = (("markov_head.markov_w1.weight", (vocab, rank)),)
        found["block.markov_out"] = (("markov_head.markov_w2.weight", (vocab, rank)),)
    if rank := block["selector_rank"]:
        found["block.predecessors"] = (("candidate_selector.predecessor_codebook", (vocab, rank)),)
        found["block.successors"] = (("candidate_selector.successor_codebook", (vocab, rank)),)
        found["block.selector_proj"] = (("candidate_selector.hidden_projection.weight", (rank, hidden)),)
    if taps := block["conv_taps"]:
        num_deltas = 2 * taps * hidden // block["conv_group_size"]
        for i, part in itertools.product(range(sizes["num_layers"]), ("attention", "mlp")):
            conv = f"model.layers.{i}.{part}_conv"
            found[f"layers.{i}.{part}_conv_base"] = ((f"{conv}.base_kernel", (2, taps, hidden)),)
            found[f"layers.{i}.{part}_conv_delta"] = ((f"{conv}.kernel_projection.weight", (num_deltas, hidden)),)
    return found


def _layer(sizes: Mapping[str, Any], layer: str, qkv_inputs: int) -> dict[str, tuple[Part, ...]]:
    hidden, inner, head_dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q_size, kv_size = sizes["num_heads"] * head_dim, sizes["num_kv_heads"] * head_dim
    found: dict[str, tuple[Part, ...]] = {}

    def vector(name: str, source: str, size: int) -> None:
        found[name] = ((f"{layer}.{source}.weight", (size,)),)

    def linear(name: str, sources: Mapping[str, int], num_in: int, bias: str) -> None:
        found[name] = tuple((f"{layer}.{source}.weight", (size, num_in)) for source, size in sources.items())
        if sizes.get(bias, True):
            found[f"{name}_bias"] = tuple((f"{layer}.{source}.bias", (size,)) for source, size in sources.items())

    vector("input_norm", "input_layernorm", hidden)
    qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    linear("qkv", qkv, qkv_inputs, "qkv_bias")
    if sizes.get("qk_norm", True):
        is_whole = sizes.get("norms_all_heads", False)
        vector("q_norm", "self_attn.q_norm", q_size if is_whole else head_dim)
        vector("k_norm", "self_attn.k_norm", kv_size if is_whole else head_dim)
    linear("o", {"self_attn.o_proj": hidden}, q_size, "o_bias")
    if sizes.get("has_sinks"):
        found["sinks"] = ((f"{layer}.self_attn.sinks", (sizes["num_heads"],)),)
    vector("post_norm", "post_attention_layernorm", hidden)
    if experts := sizes.get("experts"):
        return found | _experts(experts, f"{layer}.mlp", hidden)
    linear("gate_up", {"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, "mlp_bias")
    linear("down", {"mlp.down_proj": hidden}, inner, "mlp_bias")
    return found


def _experts(experts: Mapping[str, Any], mlp: str, hidden: int) -> dict[str, tuple[Part, ...]]:
    """Return the tensors of a layer's router, experts and shared expert. mlp: their module in the checkpoint."""
    names = [f"{mlp}.experts.{i}" for i in range(experts["num_experts"])]
    inner, shared = experts["intermediate_size"], experts["shared_size"]
    gate_up = [f"{name}.{part}_proj" for name in names for part in ("gate", "up")]
    down = [f"{name}.down_proj" for name in names]
    found: dict[str, tuple[Part, ...]] = {"router": ((f"{mlp}.gate.weight", (len(names), hidden)),)}
    if experts["has_bias"]:
        found["router_bias"] = ((f"{mlp}.gate.bias", (len(names),)),)
    for name, sources, shape in (("gate_up", gate_up, (inner, hidden)), ("down", down, (hidden, inner))):
        found[f"expert_{name}"] = tuple((f"{source}.weight", shape) for source in sources)
        if experts["has_bias"]:
            found[f"expert_{name}_bias"] = tuple((f"{source}.bias", shape[:1]) for source in sources)
    if shared:
        expert = f"{mlp}.shared_expert"
        found["shared_gate_up"] = tuple((f"{expert}.{part}_proj.weight", (shared, hidden)) for part in ("gate", "up"))
        found["shared_down"] = ((f"{expert}.down_proj.weight", (hidden, shared)),)
        found["shared_gate"] = ((f"{mlp}.shared_expert_gate.weight", (1, hidden)),)
    return found


def stacked(
    read: Callable[[str, Shape], npt.NDArray[Any]], parts: Sequence[Part], dtype: npt.DTypeLike, multiple: int = 1
) -> npt.NDArray[Any]:
    """Read and stack parts, each padded with zeros to a multiple of `multiple` rows; a single part may be a view.

    read: returns a part as dtype by its name and shape. Memory holds the result and one part at a time.
    """
    counts = [-(-shape[0] // multiple) * multiple for _, shape in parts]
    if counts == [parts[0][1][0]]:
        return read(*parts[0])
    found = np.zeros((sum(counts), *parts[0][1][1:]), dtype)
    start = 0
    for (name, shape), count in zip(parts, counts, strict=True):
        found[start : start + shape[0]] = read(name, shape)
        start += count
    return found
