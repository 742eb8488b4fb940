"""Tiny random mixtures of experts as transformers' save_pretrained writes them, and the gguf package."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import write_tokenizer
from tests.support.gguf_writer import neighbors
from tests.support.moe_checkpoints import mxfp4

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_QWEN = {"intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", "qwen3moe", _QWEN | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen2": ("Qwen2Moe", "qwen2moe", _QWEN | {"shared_expert_intermediate_size": 96}),
    "olmoe": ("Olmoe", "olmoe", {"intermediate_size": 32, "num_experts": 8}),
    "mixtral": ("Mixtral", "llama", {"intermediate_size": 32, "num_local_experts": 8, "sliding_window": 9}),
    "gpt_oss": (
        "GptOss",
        "gpt-oss",
        {"intermediate_size": 32, "num_local_experts": 8, "head_dim": 16, "sliding_window": 9},
    ),
}
"""Name of transformers' classes, GGUF architecture, and keys of the configuration."""
_EXPERTS = "mlp.experts"
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}


def publish(directory: Path, family: str, seed: int = 0, dtype: str = "float32", **changes: Any) -> Any:
    """Write a checkpoint with a tokenizer -> transformers' model in fp32, whose experts run one by one.

    Only 8 bits of each value are used, so that bf16 loses nothing. changes: of the configuration.
    """
    import transformers  # here, since every worker collects the files that import this one

    kind, _, keys = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**(SIZES | keys | changes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.endswith("norm.weight"):
                values.copy_(1 + 0.1 * torch.randn(values.shape, generator=rng))
            else:
                values.normal_(std=1.0 if "sinks" in name else 0.2, generator=rng)
            values.copy_(values.bfloat16().float())
    copy.deepcopy(model).to(getattr(torch, dtype)).save_pretrained(directory)  # to() rounds rope's frequencies, too
    write_tokenizer(directory, config.vocab_size)
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    return model


def pack_experts(directory: Path, model: Any) -> None:
    """Store a gpt-oss's experts in MXFP4 as its publisher does, and let the model compute with these values."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    state = dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj")) and _EXPERTS in name]:
        values = tensors.pop(name).float().transpose(1, 2).contiguous().numpy()  # [experts, out, in]
        blocks, scales = mxfp4(values)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = torch.from_numpy(blocks), torch.from_numpy(scales)
        with torch.no_grad():
            state[name].copy_(torch.from_numpy(ggml_values(blocks, scales)).transpose(1, 2))
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))


def ggml_blocks(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """MXFP4 in GGUF, uint8 [..., n * 17]: a block is its scale, then bytes of the values j and j + 16."""
    halves = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    packed = np.concatenate([scales[..., None], halves[..., :16] | halves[..., 16:] << 4], -1)
    return packed.reshape(*blocks.shape[:-2], -1)


def ggml_values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The fp32 values [..., n * 32] of these blocks, decoded by the gguf package."""
    return gguf.dequantize(ggml_blocks(blocks, scales), gguf.GGMLQuantizationType.MXFP4)


def write_mixture(path: Path, directory: Path, family: str, kind: str = "BF16", **keys: Any) -> Path:
    """A published checkpoint as a GGUF file, its matrices of this type; experts in MXFP4 stay so.

    keys: of the metadata without the architecture; None takes one out.
    """
    _, arch, _ = FAMILIES[family]
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    for key, value in _metadata(config, family, keys).items():
        name = f"{arch}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    definition = json.loads((directory / "tokenizer.json").read_text())
    vocab = sorted(definition["model"]["vocab"].items(), key=lambda item: item[1])
    merges = definition["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3, 3] + [1] * (len(vocab) - 2))
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), 8)
    for name, values, is_packed in _tensors(directory, config):
        stored = f"{name.replace('self_attn.sinks', 'self_attn.sinks.weight')}"
        stored = str(names.get_name(stored, (".weight", ".bias")))
        if arch == "llama" and (".attn_q." in stored or ".attn_k." in stored):
            heads = "num_attention_heads" if ".attn_q." in stored else "num_key_value_heads"
            values = neighbors(values, config[heads])
        if is_packed:
            writer.add_tensor(stored, values, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
            continue
        values = values.squeeze()
        is_vector = values.ndim == 1 or ".bias" in stored or "ffn_gate_inp" in stored
        own = gguf.GGMLQuantizationType["F32" if is_vector else kind]
        writer.add_tensor(stored, gguf.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: dict[str, Any], family: str, changes: dict[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    rope = config["rope_parameters"]
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim") or config["hidden_size"] // heads,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "attention.sliding_window": config.get("sliding_window"),
        "expert_feed_forward_length": config.get("moe_intermediate_size") or config["intermediate_size"],
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    if family in ("mixtral", "olmoe"):
        del found["expert_feed_forward_length"]
    if rope["rope_type"] == "yarn":
        found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return {key: value for key, value in (found | changes).items() if value is not None}


def _tensors(directory: Path, config: dict[str, Any]) -> list[tuple[str, np.ndarray, bool]]:
    """Hugging Face names without an expert's number, and fp32 arrays (experts: [experts, out, in]) or MXFP4 blocks."""
    stored = load_file(directory / "model.safetensors")
    number = config.get("num_experts") or config.get("num_local_experts")
    found: list[tuple[str, np.ndarray, bool]] = []
    for name, tensor in stored.items():
        values = tensor.numpy() if tensor.dtype is torch.uint8 else tensor.float().numpy()
        if ".experts.0." in name:
            each = [stored[name.replace(".experts.0.", f".experts.{i}.")].float().numpy() for i in range(number)]
            found.append((name.replace(".experts.0.", ".experts."), np.stack(each), False))
        elif ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
            found += _gpt_oss(name, values, stored)
        elif ".experts." not in name:
            found.append((name, values, False))
    return found


def _gpt_oss(name: str, values: np.ndarray, stored: dict[str, torch.Tensor]) -> list[tuple[str, np.ndarray, bool]]:
    if name.endswith("_scales"):
        return []
    kind = "bias" if name.endswith("_bias") else "weight"
    is_packed = name.endswith("_blocks")
    if is_packed:
        values = ggml_blocks(values, stored[name.replace("_blocks", "_scales")].numpy())
    elif kind == "weight":
        values = values.transpose(0, 2, 1)
    module = name.removesuffix("_blocks").removesuffix("_bias")
    if module.endswith(".down_proj"):
        return [(f"{module}.{kind}", values, is_packed)]
    parts = [(module.replace("gate_up", part), values[:, i::2]) for i, part in enumerate(("gate", "up"))]
    return [(f"{part}.{kind}", np.ascontiguousarray(rows), is_packed) for part, rows in parts]
