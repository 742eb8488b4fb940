"""Read a decoder's configuration from a Hugging Face config.json, as transformers 4 or 5 spells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser_trtllm.errors import CheckpointError, reason_of
from faser_trtllm.json_text import parse_json
from faser_trtllm.models.architectures import MIXTURES, OF_QWEN2, SUPPORTED_ARCHITECTURES, refusal
from faser_trtllm.models.experts import CLAMPED, GATE_ALPHA, GATE_LIMIT, SOFTMAX, TOP_K_SOFTMAX, ExpertsConfig
from faser_trtllm.models.rope import SUPPORTED_ROPE_TYPES, RopeConfig

_MISSING: Any = object()
MAX_LAYERS = 1000  # a limit for damaged files: each layer has a dozen tensors to name
MAX_EXPERTS = 1 << 15  # in all layers
# Defaults of missing keys in transformers' configuration of a family.
_DEFAULT_THETA = {"MixtralForCausalLM": 1e6, "GptOssForCausalLM": 150000.0}
_DEFAULT_EPS = {"MixtralForCausalLM": 1e-5, "OlmoeForCausalLM": 1e-5, "GptOssForCausalLM": 1e-5}
_DEFAULT_HEAD_DIM = {"Qwen3ForCausalLM": 128, "GptOssForCausalLM": 64}
_DEFAULT_ROPE = {
    "GptOssForCausalLM": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
}
_ALL_LAYERS_HAVE_EXPERTS: dict[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1}
_GPT_OSS_GATE: dict[str, Any] = {"swiglu_limit": GATE_LIMIT, "swiglu_alpha": GATE_ALPHA}
_OF_QWEN3 = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_QWEN = (*OF_QWEN2, *_OF_QWEN3, "Qwen2MoeForCausalLM")
_SLIDING = "sliding_attention"
_MAX_INTEGER = 2**31 - 1
_NORM_SIZE = 16  # the CPU engine norms vectors of so many floats
_MAX_NUMBER = 1e30


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family.

    intermediate_size: width of an MLP, or of one expert.
    max_position_embeddings: tokens of the longest sequence, with linear or YaRN scaling.
    windows: per layer, tokens that a row attends to, including itself; 0 for all.
    torch_dtype: type of the weights that config.json names.
    qk_norm: queries and keys are normed, each head for itself, or all heads of a row together if norms_all_heads.
    has_sinks: attention's softmax has one more logit per head, and drops that logit's share.
    experts: the mixture of experts, None for dense layers.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    torch_dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    norms_all_heads: bool = False
    has_sinks: bool = False
    experts: ExpertsConfig | None = None


def load_model_config(checkpoint_dir: Path) -> ModelConfig:
    """Read checkpoint_dir/config.json; raise CheckpointError naming file and field."""
    return parse_model_config(read_json(checkpoint_dir / "config.json"), "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; CheckpointError if it is unreadable or no object."""
    try:
        data = parse_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read in {path.parent}: {reason_of(error)}") from error
    except ValueError as error:
        raise CheckpointError(f"{path.name} in {path.parent} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path.name} in {path.parent} must hold a JSON object")
    return data


def parse_model_config(data: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """Check and translate a Hugging Face configuration; CheckpointError names source and field."""
    fields = Fields(data, source)
    architecture = next(iter(architectures_of(data)), None)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise CheckpointError(
            f"{source}: architecture {architecture} is not supported; {refusal(architecture, SUPPORTED_ARCHITECTURES)}"
        )
    is_gpt_oss, is_olmoe = architecture == "GptOssForCausalLM", architecture == "OlmoeForCausalLM"
    if data.get("quantization_config"):
        raise CheckpointError(
            f"{source}: quantization_config is set; the weights of this checkpoint must be bf16, fp16 or fp32; use the "
            "unquantized checkpoint"
        )
    hidden_act = data.get("hidden_act", "silu")
    if hidden_act != "silu":
        raise CheckpointError(f"{source}: hidden_act is {hidden_act!r}, only 'silu' is supported")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    hidden_size = fields.integer("hidden_size")
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = fields.integer("head_dim", default=0, minimum=0)
    if head_dim == 0:
        head_dim = _DEFAULT_HEAD_DIM.get(architecture, hidden_size // num_heads)
        if architecture not in _DEFAULT_HEAD_DIM and hidden_size % num_heads:
            raise CheckpointError(
                f"{source}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}; "
                "set head_dim"
            )
    if head_dim % 2:
        raise CheckpointError(f"{source}: head_dim is {head_dim}, rotary embedding needs an even number")
    if is_olmoe and num_kv_heads * head_dim % _NORM_SIZE:
        raise CheckpointError(
            f"{source}: num_key_value_heads {num_kv_heads} times head_dim {head_dim} is {num_kv_heads * head_dim}, the "
            f"norm of all keys of a row needs a multiple of {_NORM_SIZE}"
        )
    rope, longest = _parse_rope(fields, architecture, fields.integer("max_position_embeddings"))
    if is_olmoe and fields.number("clip_qkv", default=None) is not None:
        raise CheckpointError(f"{source}: clip_qkv is {data['clip_qkv']!r}, only null is supported")
    has_attention_bias = is_gpt_oss or is_olmoe or architecture in ("LlamaForCausalLM", *_OF_QWEN3)
    attention_bias = has_attention_bias and fields.boolean("attention_bias", default=is_gpt_oss)
    qkv_bias = architecture == "Qwen2MoeForCausalLM" and fields.boolean("qkv_bias", default=True)
    experts = _parse_experts(fields, architecture, num_layers) if architecture in MIXTURES else None
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=experts.intermediate_size if experts else fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rms_norm_eps=fields.number("rms_norm_eps", default=_DEFAULT_EPS.get(architecture, 1e-6)),
        rope=rope,
        windows=_parse_windows(fields, architecture, num_layers),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        qkv_bias=attention_bias or qkv_bias or architecture in OF_QWEN2,
        o_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.boolean("mlp_bias", default=False),
        qk_norm=is_olmoe or architecture in _OF_QWEN3,
        norms_all_heads=is_olmoe,
        torch_dtype=str(data.get("dtype") or data.get("torch_dtype") or "bfloat16"),
        bos_token_id=fields.integer("bos_token_id", default=None, minimum=0),
        eos_token_ids=token_ids(data.get("eos_token_id"), f"{source}: eos_token_id"),
        has_sinks=is_gpt_oss,
        experts=experts,
    )


def architectures_of(data: dict[str, Any]) -> list[str]:
    """Return the names under architectures; [] if it is missing."""
    found = data.get("architectures")
    return [str(name) for name in (found if isinstance(found, list) else [found]) if name is not None]


def token_ids(value: Any, what: str) -> tuple[int, ...]:
    """Convert a token id, a list of them or None to a tuple; CheckpointError, which names `what`, otherwise."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise CheckpointError(f"{what} is {value!r}; it must be a token id or a list of them")
    return tuple(ids)


class Fields:
    """Typed access to a JSON object; errors name the file, the field and the value."""

    def __init__(self, data: dict[str, Any], source: str) -> None:
        self.data = data
        self.source = source

    def _get(self, key: str, default: Any) -> Any:
        value = self.data.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise CheckpointError(f"{self.source}: {key} is missing")
        return default

    def integer(self, key: str, default: Any = _MISSING, minimum: int = 1, maximum: int = _MAX_INTEGER) -> Any:
        value = self._get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise CheckpointError(f"{self.source}: {key} is {value!r}; it must be an integer of at least {minimum}")
        if value > maximum:
            raise CheckpointError(f"{self.source}: {key} is {value!r:.80}; it must be at most {maximum}")
        return value

    def number(self, key: str, default: Any = _MISSING, above: float = 0.0) -> Any:
        value = self._get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= _MAX_NUMBER:
            raise CheckpointError(f"{self.source}: {key} is {value!r:.80}; it must be a number greater than {above:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.source}: {key} is {value!r}; it must be true or false")
        return value


def _parse_experts(fields: Fields, architecture: str, num_layers: int) -> ExpertsConfig:
    is_qwen, is_gpt_oss = architecture.startswith("Qwen"), architecture == "GptOssForCausalLM"
    is_olmoe = architecture == "OlmoeForCausalLM"
    count = "num_experts" if is_qwen or is_olmoe else "num_local_experts"
    width = "moe_intermediate_size" if is_qwen else "intermediate_size"
    if fields.data.get(count) is None and "num_local_experts" in fields.data:
        count = "num_local_experts"  # spelling of transformers 5
    num_experts = fields.integer(count)
    if num_layers * num_experts > MAX_EXPERTS:
        raise CheckpointError(
            f"{fields.source}: {count} is {num_experts} in each of {num_layers} layers, at most {MAX_EXPERTS} in all "
            "are read"
        )
    for key, wanted in (_ALL_LAYERS_HAVE_EXPERTS if is_qwen else _GPT_OSS_GATE if is_gpt_oss else {}).items():
        if fields.data.get(key, wanted) not in (wanted, None):
            raise CheckpointError(
                f"{fields.source}: {key} is {fields.data[key]!r:.80} in a {architecture}, only {wanted!r} is supported"
            )
    top_k = fields.integer("num_experts_per_tok", maximum=num_experts)
    inner = fields.integer(width)
    if is_gpt_oss:
        return ExpertsConfig(num_experts, top_k, inner, TOP_K_SOFTMAX, False, CLAMPED, has_bias=True)
    norm_topk = not (is_qwen or is_olmoe) or fields.boolean("norm_topk_prob", default=False)
    is_shared = architecture == "Qwen2MoeForCausalLM"
    shared_size = fields.integer("shared_expert_intermediate_size") if is_shared else 0
    return ExpertsConfig(num_experts, top_k, inner, SOFTMAX, norm_topk, shared_size=shared_size)


def _parse_rope(fields: Fields, architecture: str, max_position_embeddings: int) -> tuple[RopeConfig, int]:
    """Return the rope and the tokens of the longest sequence.

    Published recipes for long texts add a linear or YaRN scaling and leave max_position_embeddings as it was.
    """
    data, source = fields.data, fields.source
    rope = data.get("rope_scaling") or data.get("rope_parameters") or _DEFAULT_ROPE.get(architecture, {})
    if not isinstance(rope, dict):
        raise CheckpointError(f"{source}: rope_parameters is {rope!r}; it must be an object")
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"{source}: rope_parameters differ by layer, only one rope for all layers is supported")
    rope = {"rope_theta": data.get("rope_theta")} | rope
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise CheckpointError(
            f"{source}: rope_type {rope_type!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    partial = rope.get("partial_rotary_factor") or data.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise CheckpointError(f"{source}: partial_rotary_factor is {partial!r}, only 1.0 is supported")
    given_len = data.get("original_max_position_embeddings")
    original_len = given_len or max_position_embeddings
    has_original = "original_max_position_embeddings" in rope
    if (
        rope_type in ("llama3", "yarn")
        and has_original
        and given_len not in (None, rope["original_max_position_embeddings"])
    ):
        raise CheckpointError(
            f"{source}: original_max_position_embeddings is {given_len!r:.80}, but another in the rope settings, "
            "of which engines read one or the other; remove the wrong one"
        )
    rope = {"original_max_position_embeddings": original_len} | rope
    values = Fields(rope, f"{source}: rope")
    theta = values.number("rope_theta", default=_DEFAULT_THETA.get(architecture, 10000.0))
    if rope_type == "default":
        return RopeConfig(theta=theta), max_position_embeddings
    factor = values.number("factor")

    def scaled(num_tokens: int) -> int:
        return min(max(max_position_embeddings, int(factor * num_tokens)), _MAX_INTEGER)

    if rope_type == "linear":
        return RopeConfig(rope_type, theta, factor), scaled(max_position_embeddings)
    original_len = values.integer("original_max_position_embeddings")
    if rope_type == "llama3":
        low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
        if high <= low:
            raise CheckpointError(f"{source}: rope: high_freq_factor {high} must exceed low_freq_factor {low}")
        config = RopeConfig(rope_type, theta, factor, original_len, low_freq_factor=low, high_freq_factor=high)
        return config, max_position_embeddings
    config = RopeConfig(
        rope_type,
        theta,
        factor,
        original_len,
        attention_factor=values.number("attention_factor", default=None),
        beta_fast=values.number("beta_fast", default=32.0),
        beta_slow=values.number("beta_slow", default=1.0),
        mscale=values.number("mscale", default=None),
        mscale_all_dim=values.number("mscale_all_dim", default=None),
        truncate=values.boolean("truncate", default=True),
    )
    return config, scaled(original_len) if has_original else max_position_embeddings


def sliding_layers(fields: Fields, num_layers: int) -> tuple[bool, ...] | None:
    """Return, per layer, True if layer_types gives it a window; None without the key. One kind may cover all layers."""
    kinds = fields.data.get("layer_types")
    if not kinds:
        return None
    is_known = isinstance(kinds, list) and all(kind in (_SLIDING, "full_attention") for kind in kinds)
    if not is_known or (len(kinds) != num_layers and len(set(kinds)) > 1):
        raise CheckpointError(
            f"{fields.source}: layer_types is {kinds!r:.80}; it must name full_attention or {_SLIDING} for each of the "
            f"{num_layers} layers"
        )
    slides = tuple(kind == _SLIDING for kind in kinds)
    return slides if len(slides) == num_layers else slides[:1] * num_layers


def _parse_windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int, ...]:
    data, given = fields.data, sliding_layers(fields, num_layers)
    slides: tuple[bool, ...] = (True,) * num_layers
    window = data.get("sliding_window") if architecture == "MixtralForCausalLM" else None
    if architecture == "MistralForCausalLM":
        window = data.get("sliding_window", 4096)
    elif architecture == "GptOssForCausalLM":
        window = data.get("sliding_window", 128)
        slides = given or tuple(i % 2 == 0 for i in range(num_layers))
    elif architecture in _QWEN and fields.boolean("use_sliding_window", default=False):
        window = data.get("sliding_window", 4096)
        bound = fields.integer("max_window_layers", default=28, minimum=0)
        if architecture == "Qwen2MoeForCausalLM":
            slides = given or tuple(i % 2 == 0 and i < bound for i in range(num_layers))
        elif architecture != "Qwen3MoeForCausalLM":
            slides = given or tuple(i >= bound for i in range(num_layers))
    if given is not None and len(set(given)) > 1 and slides is not given and architecture not in _QWEN:
        raise CheckpointError(
            f"{fields.source}: layer_types differ, and engines differ in whether they read them for a {architecture}; "
            "remove layer_types if the model was trained without"
        )
    if window is None:
        return (0,) * num_layers
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= _MAX_INTEGER:
        raise CheckpointError(f"{fields.source}: sliding_window is {window!r:.80}; it must be null or at least 1")
    return tuple(window if slide else 0 for slide in slides)


def layer_windows(model: Mapping[str, Any]) -> list[int]:
    """Return ModelConfig.windows from the object `model` of an engine file's header; ValueError if it is malformed.

    Files of older builds have one sliding_window for all layers.
    """
    windows = model["windows"] if "windows" in model else [model["sliding_window"]] * model["num_layers"]
    is_list = isinstance(windows, list) and len(windows) == model["num_layers"]
    if not is_list or any(not isinstance(window, int) or not 0 <= window <= _MAX_INTEGER for window in windows):
        raise ValueError(f"model.windows is {windows!r:.80}")
    return windows
