"""Recognize unsupported draft checkpoints by config.json, files and tensor names, and refuse them by name.

They would draft badly if they were loaded as the supported kind that they resemble.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import read_json
from faser_trtllm.models.heads.torch_file import open_head_files

SUPPORTED = "an EAGLE-3 head, Medusa heads, a DFlash, DFlash2 or DSpark drafter, or a draft model"
UNSUPPORTED = {
    "LiLiCorr": "a transformer over a lattice of candidates picks its drafts",
    "Domino": "a recurrent network (GRU) corrects its logits by earlier drafts",
    "P-EAGLE": "it drafts all places in one pass, from mask rows with a learnt hidden row",
    "PARD-2": "it drafts from mask tokens and from rows of the target that weights in a separate file project",
    "PARD": "it drafts all places in one pass over mask tokens",
    "Laguna DFlash": "its attention has gates, and each layer's target row has a norm",
    "MiMo-V2 DFlash": "its mask token has an embedding in a separate file, and its attention has sinks",
    "DeepSeek-V4 DSpark": "its layers (mtp.*) are part of a target that is not supported",
    "EAGLE-1 or EAGLE-2": "it reads one row of the target, as HASS's heads do, where EAGLE-3's read several",
}
"""Why a draft is refused, by its kind."""

_NAMING = ("architectures", "model_type", "speculators_model_type", "projector_type", "spd_type")
_NESTED = ("dflash_config", "eagle_config", "transformer_layer_config")
_BLOCK = ("dflash", "dspark")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class _Sign(NamedTuple):
    """Signs of a kind, any of which suffices. words: in values of _NAMING. keys: beginnings of keys; they count only if
    those values have a word of `requires` and none of `unless`. tensors: parts of tensor names. files: file names."""

    kind: str
    words: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    requires: tuple[str, ...] = ("",)
    unless: tuple[str, ...] = ()


_MASK_KEYS = ("pard_token", "ptd_token_id")
_SINKS = ("attention_sink_bias", "add_swa_attention_sink_bias")
_SIGNS = (
    _Sign("LiLiCorr", ("lilicorr",), ("lilicorr_",), ("lilicorr.",)),
    _Sign("Domino", ("domino",), ("gru_hidden_dim",), ("prefix_gru.",)),
    _Sign("P-EAGLE", ("peagle", "p_eagle"), tensors=("mask_hidden",)),
    _Sign("P-EAGLE", keys=_MASK_KEYS, requires=("eagle",)),
    _Sign("PARD-2", ("pard2", "pard-2", "pard_2"), ("pard2_",), ("target_proj.",), ("warp_model.bin",)),
    _Sign("PARD", keys=(*_MASK_KEYS, "spd_type"), unless=_BLOCK),
    _Sign("Laguna DFlash", ("laguna",), tensors=("aux_hidden_norms.", "g_proj.")),
    _Sign("MiMo-V2 DFlash", ("mimov2", "mimo_v2"), _SINKS, ("attention_sink_bias",), ("mask_embedding.pt",)),
    _Sign("DeepSeek-V4 DSpark", keys=("dspark_block_size",), unless=("dspark",)),
)


def refuse_unsupported(
    data: Mapping[str, Any], source: str, names: Collection[str] = (), files: Collection[str] = ()
) -> None:
    """Raise CheckpointError for a draft checkpoint of a kind in UNSUPPORTED.

    data: the parsed config.json, which errors call source. names: tensor names. files: files of the folder.
    """
    settings = dict(_settings(data))
    naming = {key: value for key, value in settings.items() if key.rpartition(".")[2] in _NAMING}
    said = " ".join(map(str, naming.values())).lower()
    for sign in _SIGNS:
        told = _named(sign.words, naming) or _keyed(sign, settings, said) or _held(sign, names, files)
        if told:
            raise _refusal(source, told, sign.kind)
    if "draft_vocab_size" in data or any(word in said for word in ("eagle3", *_BLOCK)):
        return
    told = _named(("eagle",), naming)
    if not told and not {"fc.weight", "model.fc.weight"}.isdisjoint(names) and not _has_part(names, "hidden_norm."):
        told = "there is a tensor fc.weight and no hidden_norm"
    if told:
        raise _refusal(source, told, "EAGLE-1 or EAGLE-2")


def check_draft_folder(directory: Path) -> None:
    """Call refuse_unsupported for a draft's folder; CheckpointError also if config.json or weights are unreadable."""
    data, files = read_json(directory / "config.json"), {path.name for path in directory.iterdir()}
    refuse_unsupported(data, "config.json", files=files)
    if files.isdisjoint(_TOKENIZER):  # draft models have one, heads need none
        with ExitStack() as stack:
            refuse_unsupported(data, "config.json", tuple(open_head_files(directory, stack)), files)


def _settings(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value), with section.key in sections; leave out null and false."""
    for key, value in data.items():
        if key in _NESTED and isinstance(value, dict):
            yield from ((f"{key}.{name}", inner) for name, inner in _settings(value))
        elif value is not None and value is not False and key.isprintable():
            yield key, value


def _named(words: tuple[str, ...], naming: Mapping[str, Any]) -> str:
    found = (key for key, value in naming.items() if any(word in str(value).lower() for word in words))
    return next((f"{key} is {naming[key]!r:.80}" for key in found), "")


def _keyed(sign: _Sign, settings: Mapping[str, Any], said: str) -> str:
    if any(word in said for word in sign.unless) or not any(word in said for word in sign.requires):
        return ""
    found = (key for key in settings if key.rpartition(".")[2].startswith(sign.keys))
    return next((f"{key} is {settings[key]!r:.80}" for key in found), "")


def _held(sign: _Sign, names: Collection[str], files: Collection[str]) -> str:
    tensor = next((name for part in sign.tensors for name in names if _has_part((name,), part)), "")
    if tensor:
        return f"there is a tensor {tensor!a:.80}"
    return next((f"{file} is next to it" for file in sign.files if file in files), "")


def _has_part(names: Collection[str], part: str) -> bool:
    return any(f".{part}" in f".{name}" for name in names)


def _refusal(source: str, told: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: {told}, so the draft is {kind}, which is not supported: {UNSUPPORTED[kind]}; use {SUPPORTED}"
    )
