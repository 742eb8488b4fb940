"""Tiny random checkpoints in Hugging Face format with a real tokenizer: the whole product runs on them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT = "<|endoftext|>"
BEGIN_OF_TEXT = "<|begin|>"
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mimo": "MiMoForCausalLM",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
_LINES = (
    "The quick brown fox jumps over the lazy dog and then the other dog jumps over the fox.",
    "def add(first, second):\n    return first + second\n",
    "for index in range(10):\n    print(index, 'squared is', index * index)\n",
    "Speculative decoding proposes several tokens with a small model and checks them with a large one.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; 東京は日本の首都です 🙂.",
)


def make_checkpoint(
    directory: Path,
    architecture: str = "llama",
    vocab_size: int = 320,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    tie: bool = False,
    seed: int = 0,
    dtype: str = "bfloat16",
    sharded: bool = False,
    spelling: str = "v5",
    rope: dict[str, Any] | None = None,
    tokenizer_vocab_size: int | None = None,
    add_bos: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint and return its directory.

    head_dim: written to config.json only if given, and for Qwen3 always. spelling: "v5" (rope_parameters,
    dtype) or "v4" (rope_theta, rope_scaling, torch_dtype). rope: rope_type, rope_theta and its parameters.
    tokenizer_vocab_size: at most vocab_size, its default; below 257 not every byte has a token.
    overrides: further keys of config.json; None removes the key.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(architecture, vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, tie, dtype)
    rope = {"rope_type": "default", "rope_theta": 10000.0} | (rope or {})
    if spelling == "v5":
        config |= {"rope_parameters": rope, "dtype": dtype}
    else:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        config |= {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else scaling,
            "torch_dtype": dtype,
        }
    config |= overrides
    removed = [key for key, value in overrides.items() if value is None]
    tensors = random_tensors(config, seed)
    write_safetensors(directory, tensors, dtype, num_shards=3 if sharded else 1)
    for key in removed:
        del config[key]
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    ends = {"bos_token_id": config.get("bos_token_id"), "eos_token_id": config.get("eos_token_id")}
    (directory / "generation_config.json").write_text(json.dumps(ends))
    write_tokenizer(directory, tokenizer_vocab_size or vocab_size, add_bos)
    return directory


def make_pair(
    directory: Path, vocab_size: int = 320, *, draft_layers: int = 1, related: bool = True, **options: Any
) -> tuple[Path, Path]:
    """Write target/ and draft/ with one tokenizer -> (target_dir, draft_dir).

    related: the draft is the target's first draft_layers layers, so that drafts are accepted now and then;
    otherwise it is a model of its own. options: as in make_checkpoint, for both.
    """
    target = make_checkpoint(directory / "target", vocab_size=vocab_size, **options)
    seed = options.pop("seed", 0)
    options.pop("num_layers", None)
    draft = make_checkpoint(
        directory / "draft",
        vocab_size=vocab_size,
        num_layers=draft_layers,
        seed=seed if related else seed + 1,
        **options,
    )
    return target, draft


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """fp32 tensors under their Hugging Face names; logits have a standard deviation near 2.

    Each tensor's noise is keyed by its name: models of different depth share what they have in common.
    """
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // num_heads
    model_type = config["model_type"]
    o_bias = bool(config.get("attention_bias")) and model_type != "mimo"
    qkv_bias = o_bias or model_type in ("qwen2", "mimo")
    tensors: dict[str, np.ndarray] = {}

    def noise(name: str, shape: tuple[int, ...], scale: float) -> np.ndarray:
        key = np.random.SeedSequence([seed, *name.encode()])
        return np.random.default_rng(key).standard_normal(shape, np.float32) * np.float32(scale)

    def norm(name: str, size: int) -> None:
        tensors[name] = 1 + noise(name, (size,), 0.1)

    def linear(name: str, num_out: int, num_in: int, bias: bool) -> None:
        tensors[f"{name}.weight"] = noise(f"{name}.weight", (num_out, num_in), num_in**-0.5)
        if bias:
            tensors[f"{name}.bias"] = noise(f"{name}.bias", (num_out,), 0.2)

    tensors["model.embed_tokens.weight"] = noise("model.embed_tokens.weight", (vocab, hidden), 2 * hidden**-0.5)
    layers = [f"model.layers.{i}" for i in range(config["num_hidden_layers"])]
    mtp_layers = [f"model.mtp_layers.{i}" for i in range(config.get("num_nextn_predict_layers") or 0)]
    for layer in mtp_layers:
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            norm(f"{layer}.{name}.weight", hidden)
        linear(f"{layer}.input_proj", hidden, 2 * hidden, False)
    for layer in (*layers, *mtp_layers):
        norm(f"{layer}.input_layernorm.weight", hidden)
        linear(f"{layer}.self_attn.q_proj", num_heads * head_dim, hidden, qkv_bias)
        linear(f"{layer}.self_attn.k_proj", num_kv_heads * head_dim, hidden, qkv_bias)
        linear(f"{layer}.self_attn.v_proj", num_kv_heads * head_dim, hidden, qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, num_heads * head_dim, o_bias)
        if model_type == "qwen3":
            norm(f"{layer}.self_attn.q_norm.weight", head_dim)
            norm(f"{layer}.self_attn.k_norm.weight", head_dim)
        norm(f"{layer}.post_attention_layernorm.weight", hidden)
        mlp_bias = bool(config.get("mlp_bias"))
        linear(f"{layer}.mlp.gate_proj", inner, hidden, mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, mlp_bias)
    norm("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = noise("lm_head.weight", (vocab, hidden), 2 * hidden**-0.5)
    return tensors


def write_safetensors(directory: Path, tensors: dict[str, np.ndarray], dtype: str, num_shards: int = 1) -> None:
    """Write fp32 tensors as this dtype, in one file or in shards with their index; int64, uint8 and bool stay so."""
    names = list(tensors)
    shards = [names[i::num_shards] for i in range(num_shards)]
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors"
        if num_shards > 1:
            file = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        _write_safetensors_file(directory / file, {name: tensors[name] for name in shard}, dtype)
    if num_shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(directory: Path, vocab_size: int, add_bos: bool = False) -> None:
    """A byte-level BPE tokenizer of at most vocab_size entries: two specials (ids 0, 1), bytes, merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 2:
        common = "Ġetaoinshrdlucmfwygpbvkxqjz.,()=:'0123456789_ĊTABCDEFGHIJKLMNOPQRSUVWXYZ"
        rest = [char for char in alphabet if char not in common]
        alphabet = [*common, *rest][: max(vocab_size - 2, 0)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=[END_OF_TEXT, BEGIN_OF_TEXT],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN_OF_TEXT} $A",
            pair=f"{BEGIN_OF_TEXT} $A $B",
            special_tokens=[(BEGIN_OF_TEXT, 1)],
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _config(
    architecture: str,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int | None,
    tie: bool,
    dtype: str,
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 3 // 2,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    if head_dim is not None or architecture == "qwen3":  # Qwen3's own default is 128, not hidden_size / num_heads
        config["head_dim"] = head_dim or hidden_size // num_heads
    if architecture in ("mistral", "qwen2"):
        config["sliding_window"] = None
    return config


def _write_safetensors_file(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    code, convert = {
        "bfloat16": ("BF16", _bfloat16_bits),
        "float16": ("F16", lambda array: array.astype(np.float16)),
        "float32": ("F32", lambda array: array),
    }[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, array in tensors.items():
        blob = (array if array.dtype in _WHOLE else convert(array)).tobytes()
        header[name] = {
            "dtype": _WHOLE.get(array.dtype, code),
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    text = text.ljust((len(text) + 7) // 8 * 8)
    path.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *blobs]))


_WHOLE = {np.dtype(np.int64): "I64", np.dtype(np.uint8): "U8", np.dtype(bool): "BOOL"}


def _bfloat16_bits(array: np.ndarray) -> np.ndarray:
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
