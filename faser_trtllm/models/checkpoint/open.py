"""Open a checkpoint: a Hugging Face folder (plain, AWQ, GPTQ or fp8) or a GGUF file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from faser_trtllm.errors import CheckpointError, reason_of
from faser_trtllm.models.checkpoint.checkpoint import Checkpoint
from faser_trtllm.models.checkpoint.experts import GptOssWeights, MixtralWeights
from faser_trtllm.models.checkpoint.fp8_weights import Fp8Weights
from faser_trtllm.models.checkpoint.quantization import (
    Fp8Config,
    Mxfp4Config,
    Quantization,
    QuantizationConfig,
    parse_quantization_config,
)
from faser_trtllm.models.checkpoint.quantized_weights import QuantizedWeights
from faser_trtllm.models.config import ModelConfig, parse_model_config, read_json
from faser_trtllm.models.gguf.config import model_config
from faser_trtllm.models.gguf.file import GgufFile
from faser_trtllm.models.gguf.tokenizer import gguf_tokenizer, special_ids
from faser_trtllm.models.gguf.weights import GgufWeights
from faser_trtllm.models.tokenizer import TOKENIZER_FILE, Tokenizer, end_ids_of
from faser_trtllm.models.weights import INDEX_FILE, CheckpointWeights, Weights, check_shapes, expected_shapes

_TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_HEAD = "lm_head.weight"
_MODELOPT_FILE = "hf_quant_config.json"
_CONFIG_FILES = ("config.json", "generation_config.json", _MODELOPT_FILE)


def open_checkpoint(path: Path, stack: ExitStack, tokenizer_dir: Path | None = None) -> Checkpoint:
    """Open and check a checkpoint without reading its matrices; the stack closes it. Raises CheckpointError.

    tokenizer_dir: a folder with a tokenizer to use instead of the checkpoint's own.
    """
    checkpoint = _open_folder(path, stack, tokenizer_dir) if path.is_dir() else _open_gguf(path, stack, tokenizer_dir)
    check_shapes(checkpoint.weights, expected_shapes(checkpoint.config))
    if tokenizer_dir is not None and checkpoint.tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise CheckpointError(
            f"tokenizer_dir is {tokenizer_dir}, whose tokenizer has {checkpoint.tokenizer.vocab_size} tokens; it must "
            f"have at most vocab_size ({checkpoint.config.vocab_size}) of the model {path}; name the model's own "
            "tokenizer"
        )
    return checkpoint


def _open_folder(directory: Path, stack: ExitStack, tokenizer_dir: Path | None) -> Checkpoint:
    if not (directory / "config.json").exists() and (found := sorted(directory.glob("*.gguf"))):
        raise CheckpointError(
            f"the checkpoint {directory} has no config.json; to read {found[0].name}, name the file itself"
        )
    data = read_json(directory / "config.json")
    quantized = _quantization(directory, data.pop("quantization_config", None))
    config = parse_model_config(data)
    plain = stack.enter_context(CheckpointWeights(directory))
    notes: tuple[str, ...] = ()
    if config.tie_word_embeddings and _HEAD in plain and not plain.are_equal(_HEAD, "model.embed_tokens.weight"):
        config = dataclasses.replace(config, tie_word_embeddings=False)
        notes = (f"tie_word_embeddings is set, but {_HEAD} is no copy of the embedding: it is the head",)
    weights = _weights(plain, config, quantized)
    tokenizer_from = tokenizer_dir or directory
    names = (*plain.files, *(name for name in (*_CONFIG_FILES, INDEX_FILE) if (directory / name).exists()))
    tokenizer_files = _existing(tokenizer_from)
    ends = end_ids_of(directory, config.vocab_size)
    return Checkpoint(
        directory,
        config,
        weights,
        Tokenizer.load(tokenizer_from, config.vocab_size, ends),
        _contents(tokenizer_files),
        {name: directory / name for name in names} | tokenizer_files,
        _stored_types(plain, quantized),
        notes,
    )


def _weights(plain: CheckpointWeights, config: ModelConfig, quantized: Quantization | None) -> Weights:
    """Return the model's tensors under Qwen3's names, decoded when they are read."""
    is_gpt_oss = config.architecture == "GptOssForCausalLM"
    if quantized is not None and isinstance(quantized, Mxfp4Config) != is_gpt_oss:
        raise CheckpointError(
            f"config.json: a {config.architecture} with this quantization_config is not supported: mxfp4 is supported "
            "only for GptOssForCausalLM, and GptOssForCausalLM only in mxfp4; take the unquantized checkpoint"
        )
    if is_gpt_oss and config.experts is not None:
        return GptOssWeights(plain, config.experts.num_experts)
    weights: Weights = plain
    packed: QuantizedWeights | None = None
    if isinstance(quantized, Fp8Config):
        weights = Fp8Weights(plain, quantized)
    elif isinstance(quantized, QuantizationConfig):
        weights = packed = QuantizedWeights(plain, quantized)
    if config.architecture == "MixtralForCausalLM":
        weights = MixtralWeights(weights)
    if packed is not None:
        check_shapes(weights, expected_shapes(config))
        packed.check_biases(config)
    return weights


def _open_gguf(path: Path, stack: ExitStack, tokenizer_dir: Path | None) -> Checkpoint:
    file = stack.enter_context(GgufFile(path))
    config = model_config(file)
    weights = GgufWeights(file, config)
    ends, bos = special_ids(file.metadata, path.name, config.vocab_size)
    if tokenizer_dir is not None:
        found = _existing(tokenizer_dir)
        tokenizer, contents = Tokenizer.load(tokenizer_dir, config.vocab_size, ends), _contents(found)
    else:
        found = {}
        translated = gguf_tokenizer(file.metadata, path.name)
        contents = dict(translated.files)
        try:
            tokenizer = Tokenizer(contents[TOKENIZER_FILE].decode(), bos)
        except CheckpointError as error:
            raise CheckpointError(
                f"{path.name}: the tokenizer cannot be used ({error}); give a folder with the model's "
                "tokenizer.json as --tokenizer_dir"
            ) from error
        tokenizer.end_at(ends, config.vocab_size)
    types = sorted({tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1})
    config = dataclasses.replace(config, bos_token_id=bos, eos_token_ids=ends)
    return Checkpoint(path, config, weights, tokenizer, contents, {path.name: path} | found, tuple(types))


def _quantization(directory: Path, found: object) -> Quantization | None:
    """Return the quantization from config.json or from the file of older ModelOpt versions; None without one."""
    if found:
        return parse_quantization_config(found)
    if not (directory / _MODELOPT_FILE).exists():
        return None
    data = read_json(directory / _MODELOPT_FILE).get("quantization")
    if not isinstance(data, dict):
        raise CheckpointError(f"{_MODELOPT_FILE}: quantization is {data!r:.80}; it must be an object")
    return parse_quantization_config(data | {"quant_method": "modelopt"}, _MODELOPT_FILE)


def _stored_types(weights: CheckpointWeights, quantized: Quantization | None) -> tuple[str, ...]:
    types = {weights.dtype(name) for name in weights if len(weights.shape(name)) > 1 and name.endswith(".weight")}
    if isinstance(quantized, QuantizationConfig):
        types.add(f"{quantized.method.upper()} {quantized.bits}-bit")
    elif isinstance(quantized, Mxfp4Config):
        types.add("MXFP4")
    return tuple(sorted(types))


def _existing(directory: Path) -> dict[str, Path]:
    return {name: directory / name for name in _TOKENIZER_FILES if (directory / name).exists()}


def _contents(files: Mapping[str, Path]) -> dict[str, bytes]:
    try:
        return {name: path.read_bytes() for name, path in files.items()}
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {reason_of(error)}") from error
