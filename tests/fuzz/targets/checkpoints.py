"""Checkpoints: safetensors, configurations of folders, GGUF files, tokenizers and draft heads."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import shutil
import struct
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from faser_trtllm.errors import FaserError
from faser_trtllm.models.checkpoint.open import open_checkpoint
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.heads.block import BlockWeights, is_block, load_block_config
from faser_trtllm.models.heads.block import expected_shapes as block_shapes
from faser_trtllm.models.heads.eagle3 import Eagle3Weights, is_eagle3, load_eagle3_config
from faser_trtllm.models.heads.eagle3 import expected_shapes as eagle3_shapes
from faser_trtllm.models.heads.medusa import MedusaWeights, is_medusa, load_medusa_config
from faser_trtllm.models.heads.medusa import expected_shapes as medusa_shapes
from faser_trtllm.models.heads.torch_file import open_head_files
from faser_trtllm.models.tokenizer import IncrementalDetokenizer, Tokenizer
from faser_trtllm.models.weights import CheckpointWeights, Weights, expected_shapes
from tests.fuzz.scratch import JSON, folder, from_json, headed, put, to_json
from tests.fuzz.target import Codec, Target
from tests.fuzz.targets.gguf_file import gguf_codec, gguf_seeds
from tests.support.block_drafter import make_block_drafter
from tests.support.checkpoints import LLAMA3_ROPE, YARN_ROPE, make_checkpoint
from tests.support.eagle3 import make_deepspec_head, make_head, make_speculators_head
from tests.support.fp8_writer import KINDS, write_fp8
from tests.support.medusa import make_medusa
from tests.support.moe_checkpoints import make_moe_checkpoint
from tests.support.quantized_writer import write_quantized
from tests.support.sentencepiece import sentencepiece_backend

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 8,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "intermediate_size": 8,
}
MIXTURES = ["qwen3_moe", "mixtral", "gpt_oss"]
BASES = ["llama", "qwen2", "qwen3", "mistral", "mimo", "awq", "gptq", "sharded", *KINDS, *MIXTURES]

FILES = ("config.json", "generation_config.json", "model.safetensors.index.json", "hf_quant_config.json")
FILES += ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json")


@functools.cache
def base(name: str) -> Path:
    """A small checkpoint that inputs build on."""
    path = folder("base") / name
    if name in ("awq", "gptq"):
        plain = make_checkpoint(folder(f"base/{name}-plain"), **SIZES | {"hidden_size": 32, "intermediate_size": 32})
        write_quantized(plain, path, name)
    elif name in KINDS:
        plain = make_checkpoint(folder(f"base/{name}-plain"), **SIZES)
        write_fp8(plain, path, name)
    elif name == "sharded":
        make_checkpoint(path, sharded=True, **SIZES)
    elif name in MIXTURES:
        sizes = SIZES | ({"hidden_size": 32} if name == "gpt_oss" else {})
        make_moe_checkpoint(path, name, num_experts=2, top_k=1, expert_size=sizes["hidden_size"], **sizes)
    else:
        make_checkpoint(path, name, **SIZES)
    return path


def read_all(weights: Weights, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        weights.bfloat16(name, shape)
        weights.float32(name, shape)


# safetensors


def run_safetensors(data: bytes) -> None:
    put("safetensors/model.safetensors", data)
    held = []
    with CheckpointWeights(folder("safetensors")) as weights:
        for name in weights:
            shape = weights.shape(name)
            for read in (weights.float32, weights.bfloat16, weights.integers):
                with contextlib.suppress(FaserError):
                    held.append(read(name, shape))  # views outlive the weights
            for other in (weights.int32, weights.fp8):
                with contextlib.suppress(FaserError):
                    other(name)


def safetensors_seeds() -> list[bytes]:
    plain = {"a": np.ones((2, 2), np.float32), "b": np.arange(3), "c": np.zeros((0, 4), np.float16)}
    more = {"n.weight": np.zeros(2, np.int32), "m": np.ones((), np.float32), "u": np.zeros(5, np.uint8)}
    return [save(plain), save(plain | more, {"format": "pt"}), save({}), save({"é": np.ones(1, np.float64)})]


# folders


def run_folder(data: bytes) -> None:
    """The input is an object of files' contents by name; "base" names what it changes."""
    given = from_json(data, dict)
    name = given.pop("base", None)
    origin = base(name if name in BASES else "llama")
    path = folder("folder")
    shutil.rmtree(path)
    path.mkdir()
    for file in origin.iterdir():
        (path / file.name).symlink_to(file)
    for file_name, content in given.items():
        if file_name in FILES:
            (path / file_name).unlink(missing_ok=True)
            with contextlib.suppress(UnicodeError):
                (path / file_name).write_bytes(content.encode() if isinstance(content, str) else to_json(content))
    with ExitStack() as stack:
        checkpoint = open_checkpoint(path, stack)
        read_all(checkpoint.weights, expected_shapes(checkpoint.config))


def folder_seeds() -> list[bytes]:
    found: list[dict[str, Any]] = []
    for name in BASES:
        there = {
            file: json.loads((base(name) / file).read_text()) for file in FILES[:4] if (base(name) / file).exists()
        }
        found.append({"base": name} | there)
    config = found[0]["config.json"]
    for rope in (LLAMA3_ROPE, YARN_ROPE, {"rope_type": "linear", "factor": 2.0}):
        found.append({"config.json": config | {"rope_parameters": rope | {"rope_theta": 1e4}}})
    qwen2 = found[1]["config.json"] | {"use_sliding_window": True, "sliding_window": 16}
    for layers in (
        {"max_window_layers": 0},
        {"layer_types": ["sliding_attention"]},
        {"layer_types": ["full_attention"]},
    ):
        found.append({"base": "qwen2", "config.json": qwen2 | layers})
    found.append({"config.json": config, "tokenizer_config.json": {"eos_token": {"content": "a"}, "bos_token": "b"}})
    found.append({"tokenizer.json": "{", "config.json": config})
    return [json.dumps(entry).encode() for entry in found]


# GGUF


def run_gguf(data: bytes) -> None:
    path = put("gguf/model.gguf", data)
    with ExitStack() as stack:
        checkpoint = open_checkpoint(path, stack)
        read_all(checkpoint.weights, expected_shapes(checkpoint.config))
        open_checkpoint(path, stack, base("llama"))  # with another tokenizer


# tokenizers


def run_tokenizer(data: bytes) -> None:
    put("tokenizer/tokenizer.json", data)
    tokenizer = Tokenizer.load(folder("tokenizer"))
    text = "The quick brown fox, it's 42 ▁times naïve 😀\n\n<|endoftext|> é"
    for parse in (False, True):
        ids = tokenizer.encode(text, parse_special_tokens=parse)
        tokenizer.decode(ids)
    tokenizer.decode(range(min(64, tokenizer.vocab_size)), skip_special_tokens=False)
    for i in range(min(64, tokenizer.vocab_size)):
        IncrementalDetokenizer(tokenizer, before=[i]).peek(i)
    tokenizer.fingerprint()
    tokenizer.first_difference(Tokenizer(tokenizer.definition))


def tokenizer_seeds() -> list[bytes]:
    byte_level = (base("llama") / "tokenizer.json").read_bytes()
    small = json.loads(byte_level)
    vocab = dict(list(small["model"]["vocab"].items())[:40])
    small["model"] |= {"vocab": vocab, "merges": []}
    kinds = [
        {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1, "##b": 2}, "unk_token": "[UNK]"}
        | {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
        {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
        {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁a", -1.0], ["b", -2.0]], "unk_id": 0, "byte_fallback": False},
    ]
    others = [
        {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
        for model in kinds
    ]
    others[2] |= {"decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}}
    two = json.dumps(small | {"decoder": {"type": "Sequence", "decoders": [small["decoder"], {"type": "Fuse"}]}})
    sentencepiece = [sentencepiece_backend(metaspace).to_str().encode() for metaspace in (False, True)]
    return [
        byte_level,
        json.dumps(small).encode(),
        *sentencepiece,
        two.encode(),
        *(json.dumps(other).encode() for other in others),
    ]


# draft heads


def run_torch_head(data: bytes) -> None:
    """The first byte says which head's configuration the file is next to."""
    is_eagle = data[:1] == b"e"
    target = base("llama")
    path = folder("eagle3" if is_eagle else "medusa")
    if not (path / "config.json").exists():
        make = make_head if is_eagle else make_medusa
        options: dict[str, Any] = {"layers": (0, 1)} if is_eagle else {"num_heads": 2}
        config = make(folder("heads"), target, **options) / "config.json"
        shutil.copy(config, path / "config.json")
    put(f"{path.name}/pytorch_model.bin", data[1:])
    target_config = load_model_config(target)
    with ExitStack() as stack:
        files = open_head_files(path, stack)
        for name in files:
            files.dtype(name)
        if is_eagle and is_eagle3(path):
            weights = Eagle3Weights(files, stack.enter_context(CheckpointWeights(target)))
            config3 = load_eagle3_config(path, weights, target_config, (0, 1))
            read_all(weights, eagle3_shapes(config3))
            weights.target_ids(config3.draft_vocab_size, target_config.vocab_size)
        elif is_medusa(path):
            heads = MedusaWeights(files)
            read_all(heads, medusa_shapes(load_medusa_config(path, heads, target_config)))


def torch_head_seeds() -> list[bytes]:
    import torch

    target, found = base("llama"), []
    for biases in (True, False):
        made = folder(f"torch-{biases}")
        make_medusa(made, target, num_heads=2, biases=biases, torch_file="pytorch_model.bin")
        found.append(b"m" + (made / "pytorch_model.bin").read_bytes())
    from safetensors.torch import load_file

    head = make_head(folder("torch-eagle"), target, layers=(0, 1))
    tensors = load_file(head / "model.safetensors")
    module = torch.nn.Linear(2, 3, dtype=torch.bfloat16)
    parameters = dict(module.named_parameters())
    for content in (tensors, tensors | module.state_dict(), parameters, module.state_dict()):
        stream = io.BytesIO()
        torch.save(content, stream)
        found.append(b"e" + stream.getvalue())
    return found


def _unzipped(data: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(data[1:])) as archive:
        return [data[:1], {name: archive.read(name) for name in archive.namelist()}]


def _zipped(value: Any) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in value[1].items():
            archive.writestr(name, content if isinstance(content, bytes) else to_json(content))
    return value[0][:1] + stream.getvalue()


def run_head_config(data: bytes) -> None:
    """[kind, config.json, shapes of tensors by name]."""
    given = from_json(data, list)
    if len(given) != 3 or not isinstance(given[2], dict):
        return
    target = base("llama")
    target_config = load_model_config(target)
    head = given[0] if given[0] in ("eagle3", "block") else "medusa"
    path = folder(f"head-{head}")
    tensors = {}
    for name, shape in list(given[2].items())[:100]:
        kind = np.int64 if name == "d2t" else np.float32
        with contextlib.suppress(ValueError, TypeError, MemoryError, UnicodeError):
            name.encode()
            is_small = all(type(size) is int for size in shape) and math.prod(shape) < 10_000
            tensors[name] = np.zeros(shape if is_small else (), kind)
    (path / "model.safetensors").write_bytes(save(tensors))
    (path / "config.json").write_bytes(to_json(given[1]))
    with ExitStack() as stack:
        files = open_head_files(path, stack)
        if head == "block" and is_block(path):
            of_block = BlockWeights(files, stack.enter_context(CheckpointWeights(target)), False)
            read_all(of_block, block_shapes(load_block_config(path, of_block, target_config)))
        elif head == "eagle3" and is_eagle3(path):
            weights = Eagle3Weights(files, stack.enter_context(CheckpointWeights(target)))
            config3 = load_eagle3_config(path, weights, target_config)
            read_all(weights, eagle3_shapes(config3))
            weights.target_ids(config3.draft_vocab_size, target_config.vocab_size)
        elif is_medusa(path):
            heads = MedusaWeights(files)
            read_all(heads, medusa_shapes(load_medusa_config(path, heads, target_config)))


def _described(head: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json, and the tensors' shapes."""
    with safe_open(head / "model.safetensors", "numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return json.loads((head / "config.json").read_text()), shapes


def head_config_seeds() -> list[bytes]:
    target = base("llama")
    (eagle3, names3), (medusa, names), (other, other_names), (whole, whole_names) = (
        _described(path)
        for path in (
            make_head(folder("config-eagle3"), target, layers=(0, 1)),
            make_medusa(folder("config-medusa"), target),
            make_medusa(folder("config-vllm"), target, layout="vllm", num_layers=2, biases=False),
            make_head(folder("config-whole"), target, layers=(0, 1), draft_vocab_size=None, naming="layers.0"),
        )
    )
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    speculators = {"speculators_model_type": "eagle3", "transformer_layer_config": eagle3, "draft_vocab_size": 96}
    found = [["eagle3", config, names3] for config in (eagle3, eagle3 | layers, speculators | layers)]
    found += [["eagle3", eagle3 | {"eagle_config": layers}, names3], ["eagle3", whole | layers, whole_names]]
    norms: dict[str, Any] = {"norm_before_fc": True, "norm_output": True, "num_layers": 2}
    for made in (
        make_speculators_head(folder("config-speculators"), target, layers=(0, 1), **norms),
        make_deepspec_head(folder("config-deepspec"), target, layers=(0, 1), fc_norm=True),
    ):
        found.append(["eagle3", *_described(made)])
    found += [["medusa", medusa, names], ["medusa", other, other_names]]
    found += [["medusa", {"architectures": ["MedusaModel"]}, names]]
    for layout in ("dflash", "dflash_nested", "dflash2", "dspark", "speculators_dspark"):
        group = {"conv_group_size": 4} if layout == "dflash2" else {}
        options: dict[str, Any] = {"num_layers": 1, "layers": (0, 1), "windows": (6,), "block": group}
        found.append(["block", *_described(make_block_drafter(folder(f"config-{layout}"), target, layout, **options))])
    return [json.dumps(entry).encode() for entry in found]


TARGETS = (
    Target(
        "safetensors",
        run_safetensors,
        safetensors_seeds,
        ("models/safetensors_file.py", "models/weights.py"),
        headed(struct.Struct("<Q"), ()),
        words=("F32", "BF16", "F16", "I64", "I32", "F8_E4M3", "F4", "__metadata__", "dtype", "shape", "data_offsets"),
    ),
    Target(
        "checkpoint_folder",
        run_folder,
        folder_seeds,
        ("models/config.py", "models/checkpoint/quantization.py", "models/checkpoint/open.py", "json_text.py"),
        JSON,
        words=("llama3", "yarn", "awq", "gptq", "fp8", "compressed-tensors", "modelopt", "base", "sliding_attention"),
    ),
    Target(
        "gguf",
        run_gguf,
        gguf_seeds,
        ("models/gguf/file.py", "models/gguf/config.py", "models/gguf/tokenizer.py", "models/gguf/weights.py"),
        gguf_codec,
    ),
    Target(
        "tokenizer",
        run_tokenizer,
        tokenizer_seeds,
        ("models/tokenizer.py",),
        JSON,
        words=("ByteLevel", "Sequence", "ByteFallback", "Fuse", "Strip", "Replace", "Metaspace", "BPE", "Unigram"),
    ),
    Target("torch_head", run_torch_head, torch_head_seeds, ("models/heads/torch_file.py",), Codec(_unzipped, _zipped)),
    Target(
        "head_config",
        run_head_config,
        head_config_seeds,
        ("models/heads/medusa.py", "models/heads/eagle3.py", "models/heads/block.py"),
        JSON,
    ),
)
