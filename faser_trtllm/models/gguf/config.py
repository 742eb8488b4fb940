"""Read a decoder's configuration from GGUF metadata, and map tensor names to those of the file."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.architectures import refusal
from faser_trtllm.models.config import ModelConfig, parse_model_config
from faser_trtllm.models.gguf.file import GgufFile
from faser_trtllm.models.rope import RopeConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
"""Hugging Face's architecture by general.architecture. "llama" is also Mistral, and with expert_count Mixtral."""
ROPE_FREQS = "rope_freqs.weight"
_MIN_TENSORS_PER_LAYER = 9
_MISSING: Any = object()
_OUTER_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_EXPERT = re.compile(r"(?<=\.mlp\.experts)\.(\d+)(?=\.)")
# Keys of other models' mixtures, with the values that change nothing.
_ROUTING = {
    "expert_gating_func": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "leading_dense_block_count": (0,),
}


def gguf_name(name: str, architecture: str) -> tuple[str, int | None]:
    """Return a tensor's name in GGUF, and the index of an expert in that tensor; None for other tensors.

    One tensor holds all experts of a layer. KeyError for a Hugging Face name that no supported model has.
    """
    expert = _EXPERT.search(name)
    if expert is not None:
        name = name[: expert.start()] + name[expert.end() :]
    module, kind = (name, "weight") if name.endswith(".sinks") else name.rsplit(".", 1)
    if module in _OUTER_NAMES:
        return f"{_OUTER_NAMES[module]}.{kind}", None
    _, _, layer, rest = module.split(".", 3)
    stored = _LAYER_NAMES[rest]
    if architecture == "gpt-oss" and stored == "ffn_norm":
        stored = "post_attention_norm"
    return f"blk.{layer}.{stored}.{kind}", None if expert is None else int(expert[1])


def model_config(file: GgufFile) -> ModelConfig:
    """Check and translate a file's metadata; CheckpointError names file, key and value."""
    source = file.path.name
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{source}: general.architecture {architecture!r:.60} is not supported; "
            f"{refusal(architecture, tuple(ARCHITECTURES))}"
        )
    keys = _Keys(file.metadata, architecture, source)
    num_layers = keys.integer("block_count")
    if num_layers * _MIN_TENSORS_PER_LAYER > len(file.tensors):
        raise CheckpointError(
            f"{source}: {architecture}.block_count is {num_layers}, but {len(file.tensors)} tensors are too few for "
            f"that; the file is damaged or not a whole model"
        )
    hidden_size, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if num_heads < 1:
        raise CheckpointError(f"{source}: {architecture}.attention.head_count is {num_heads}; it must be at least 1")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{source}: {architecture}.{key} is {keys.integer(key)}, only {head_dim}, the length of a key, is "
                "supported"
            )
    embedding = file.tensors.get("token_embd.weight")
    data = {
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": embedding.shape[0] if embedding else keys.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(keys),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "bfloat16",
    }
    if architecture not in ("qwen2", "qwen2moe"):
        data["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if architecture == "llama":
        data["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    is_mixtral = architecture == "llama" and keys.integer("expert_count", 0) > 0
    if is_mixtral or architecture in ("qwen2moe", "qwen3moe", "olmoe", "gpt-oss"):
        data |= _experts(keys)
    else:
        data["intermediate_size"] = keys.integer("feed_forward_length")
    config = parse_model_config(data, source)
    # context_length already includes the rope scaling.
    config = dataclasses.replace(config, max_position_embeddings=data["max_position_embeddings"])
    if architecture != "gpt-oss":
        config = dataclasses.replace(config, windows=(keys.integer("attention.sliding_window", 0),) * num_layers)
    return _with_rope_freqs(config, file)


def _experts(keys: _Keys) -> dict[str, Any]:
    """Return the settings of a mixture of experts under their names in config.json."""
    for key, neutral in _ROUTING.items():
        if keys.number(key, neutral[0]) not in neutral:
            raise CheckpointError(
                f"{keys.source}: {keys.architecture}.{key} is {keys.number(key)}, only {neutral[-1]} is supported"
            )
    data = {"num_local_experts": keys.integer("expert_count"), "num_experts_per_tok": keys.integer("expert_used_count")}
    if keys.architecture in ("llama", "olmoe"):
        data["intermediate_size"] = keys.integer("feed_forward_length")
        return data | ({"architectures": ["MixtralForCausalLM"]} if keys.architecture == "llama" else {})
    width = keys.integer("expert_feed_forward_length")
    if keys.architecture == "gpt-oss":
        return data | {"intermediate_size": width, "sliding_window": keys.integer("attention.sliding_window")}
    data["moe_intermediate_size"] = width
    if keys.architecture == "qwen2moe":
        data["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")
    # GGUF has no key for norm_topk_prob: of these three, its runtimes normalize the weights of Qwen3's experts only.
    return data | {"norm_topk_prob": keys.architecture == "qwen3moe"}


def _rope(keys: _Keys) -> dict[str, Any]:
    kind = keys.text("rope.scaling.type", "none")
    if keys.number("rope.scale_linear", 1.0) not in (0.0, 1.0):  # an older spelling of the factor
        raise CheckpointError(
            f"{keys.source}: {keys.architecture}.rope.scale_linear is {keys.number('rope.scale_linear')}, only its "
            "newer spelling, rope.scaling.type linear and rope.scaling.factor, is supported; convert the model again"
        )
    rope = {"rope_type": "default" if kind == "none" else kind, "rope_theta": keys.number("rope.freq_base", 10000.0)}
    known = {"type", "finetuned", "original_context_length"}
    if kind != "none":
        rope["factor"] = keys.number("rope.scaling.factor")
        known.add("factor")
        original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
        rope["original_max_position_embeddings"] = original
    elif keys.number("rope.scaling.factor", 1.0) in (0.0, 1.0):
        known.add("factor")
    if kind == "yarn":
        for key in ("beta_fast", "beta_slow"):
            known.add(f"yarn_{key}")
            value = keys.number(f"rope.scaling.yarn_{key}", None)
            if value is not None:
                rope[key] = value
        # GGUF has no key for truncate: gpt-oss does not round YaRN's bounds between frequencies.
        rope["truncate"] = keys.architecture != "gpt-oss"
    if keys.number("rope.scaling.attn_factor", 1.0) == 1.0:
        known.add("attn_factor")
    prefix = f"{keys.architecture}.rope.scaling."
    for key in keys.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in known:
            raise CheckpointError(
                f"{keys.source}: {key} is {keys.metadata[key]!r:.80} with rope scaling {kind!r}, which is not supported"
            )
    return rope


def _with_rope_freqs(config: ModelConfig, file: GgufFile) -> ModelConfig:
    """Add the frequency factors that files of Llama 3.1 and later hold in a tensor; raises CheckpointError."""
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return config
    source = file.path.name
    if config.rope.rope_type != "default":
        raise CheckpointError(
            f"{source}: it has both the tensor {ROPE_FREQS} and rope scaling {config.rope.rope_type!r}, but only "
            "one of them is supported at a time; use a file with one of them"
        )
    if tensor.type.name != "F32" or tensor.shape != (config.head_dim // 2,):
        raise CheckpointError(
            f"{source}: {ROPE_FREQS} is {tensor.type.name} of shape {list(tensor.shape)}; it must be F32 of "
            f"[{config.head_dim // 2}]"
        )
    factors = file.data(ROPE_FREQS).view("<f4")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise CheckpointError(f"{source}: {ROPE_FREQS} has factors that are not positive numbers")
    rope = RopeConfig("freq_factors", config.rope.theta, freq_factors=tuple(factors.tolist()))
    return dataclasses.replace(config, rope=rope)


class _Keys:
    """Typed access to the keys of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, source: str) -> None:
        self.metadata = metadata
        self.architecture = architecture
        self.source = source

    def integer(self, key: str, default: Any = _MISSING) -> Any:
        """Return an integer of at least 0, or the value that all elements of an array share."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is not default and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise self._wrong(key, "one integer of at least 0, the same for all layers")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """Return a finite number of at least 0."""
        value = self._get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not default and (not is_number or not math.isfinite(value) or value < 0):
            raise self._wrong(key, "a number of at least 0")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is _MISSING:
            raise CheckpointError(f"{self.source}: {self.architecture}.{key} is missing")
        return value

    def _wrong(self, key: str, wanted: str) -> CheckpointError:
        name = f"{self.architecture}.{key}"
        # An array's text has line breaks from its 75th character on.
        return CheckpointError(f"{self.source}: {name} is {self.metadata[name]!r:.60}; it must be {wanted}")
