"""Read the engine directory that `faser build` writes; its manifest shows that it is complete.

E/{target,draft}/{config.json,rank0.engine}   TensorRT-LLM's engine layout, our entries under "faser"
E/tokenizer.json, ...                         the target's tokenizer files
E/manifest.json                               written last: sources, sizes and sha256 of everything
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from faser_trtllm.errors import EngineFileError, reason_of
from faser_trtllm.json_text import parse_json

MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT = 1
ENGINE_FILE = "rank0.engine"
CONFIG_FILE = "config.json"
_REBUILD = "rebuild it with faser build"
_HEADS = ("eagle3", "medusa", "mtp", "block")
_KV_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """Limits that engines were built for. max_num_tokens: rows of one pass. max_draft_len: 0 if nothing can draft."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_draft_len: int
    tokens_per_block: int


@dataclass(frozen=True, slots=True)
class EngineDir:
    """A directory whose files match its manifest. target_config, draft_config: each engine's parsed config.json."""

    path: Path
    manifest: Mapping[str, Any]
    build_config: BuildConfig
    target_config: Mapping[str, Any]
    draft_config: Mapping[str, Any] | None

    @classmethod
    def load(cls, path: Path, verify_hashes: bool = False) -> EngineDir:
        """Read a directory and check its files' sizes, with verify_hashes also contents; raises EngineFileError."""
        manifest = _read_manifest(path)
        check_sizes(path, manifest["files"])
        for mismatch in hash_mismatches(path, manifest["files"]) if verify_hashes else ():
            raise EngineFileError(f"{mismatch}; {_REBUILD}")
        target, limits = _read_engine_config(path, "target")
        draft = _read_engine_config(path, "draft")[0] if "draft" in manifest["checkpoints"] else None
        build_config = BuildConfig(
            limits.max_batch_size,
            limits.max_num_tokens,
            limits.max_seq_len,
            limits.max_draft_len,
            limits.plugin_config.tokens_per_block,
        )
        return cls(path, manifest, build_config, target, draft)

    @property
    def backend(self) -> str:
        return str(self.manifest["backend"])

    @property
    def target_sha256(self) -> str:
        """The sha256 of the target's engine file in the manifest."""
        return str(self.manifest["files"][self.target_path.relative_to(self.path).as_posix()]["sha256"])

    @property
    def has_draft(self) -> bool:
        return self.draft_config is not None

    @property
    def target_path(self) -> Path:
        return self.path / "target" / ENGINE_FILE

    @property
    def draft_path(self) -> Path:
        """The draft's engine file; ValueError if the directory has no draft."""
        if not self.has_draft:
            raise ValueError(f"{self.path} has no draft engine")
        return self.path / "draft" / ENGINE_FILE

    @property
    def tokenizer_dir(self) -> Path:
        """The directory of tokenizer.json and generation_config.json."""
        return self.path

    @property
    def vocab_size(self) -> int:
        return int(self.target_config["pretrained_config"]["vocab_size"])

    @property
    def draft_head(self) -> str | None:
        """The kind of the draft head ("eagle3", "medusa", "mtp", "block"); None without a head."""
        ours = self.draft_config["faser"] if self.draft_config is not None else {}
        return next((kind for kind in _HEADS if kind in ours), None)

    @property
    def draft_window(self) -> int | None:
        """Context length of the draft model in tokens; None without one or for a head, which has no limit."""
        if self.draft_config is None or self.draft_head is not None:
            return None
        return int(self.draft_config["pretrained_config"]["max_position_embeddings"])

    @property
    def read_layers(self) -> tuple[int, ...]:
        """Target layers whose inputs a draft head reads, ascending; num_layers: the last output; () without one."""
        kind = self.draft_head
        if kind is None or self.draft_config is None:
            return ()
        layers = self.draft_config["faser"][kind].get("layers")
        return tuple(layers or [self.target_config["pretrained_config"]["num_hidden_layers"]])

    @property
    def tp_size(self) -> int:
        """Number of GPUs that the target is split over."""
        return int(self.target_config["pretrained_config"]["mapping"]["tp_size"])

    def kv_bytes_per_token(self, itemsize: int | None = None) -> int:
        """Return the bytes per token on rank 0: KV of target and draft, and hidden rows that a head reads.

        itemsize: bytes of a KV value; None: the size of the engines' dtype.
        """
        target = _kv_bytes_per_token(self.target_config["pretrained_config"], itemsize) // self.tp_size
        if self.draft_config is None:
            return target
        pretrained, ours = self.draft_config["pretrained_config"], self.draft_config["faser"]
        row_itemsize = 4 if self.backend == "cpu" else _KV_ITEMSIZES[pretrained["dtype"]]  # KV on a CPU may be fp32
        if "medusa" in ours:  # Medusa heads have no KV
            return target + row_itemsize * int(pretrained["hidden_size"])
        kept = sum(int(ours[kind]["num_features"]) for kind in ("eagle3", "mtp", "block") if kind in ours)
        return target + _kv_bytes_per_token(pretrained, itemsize) + row_itemsize * kept


Size = Annotated[int, Field(ge=1, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Mapping(_Checked):
    tp_size: Size


class _Pretrained(_Checked):
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Count
    num_key_value_heads: Size
    head_size: Size
    max_position_embeddings: Size
    dtype: Literal["bfloat16", "float16", "float32"]
    mapping: _Mapping


class _Plugins(_Checked):
    tokens_per_block: Size


class _Limits(_Checked):
    max_batch_size: Size
    max_num_tokens: Size
    max_seq_len: Size
    max_draft_len: Count
    plugin_config: _Plugins


class _Head(_Checked):
    num_features: Size
    layers: list[Count] | None = None


class _Faser(_Checked):
    """The entry of the draft head, if there is one; the default values stand for none."""

    eagle3: _Head = _Head(num_features=1)
    mtp: _Head = _Head(num_features=1)
    block: _Head = _Head(num_features=1)
    medusa: dict[str, Any] = {}


class _EngineConfig(_Checked):
    """The keys of an engine's config.json that this module reads."""

    build_config: _Limits
    pretrained_config: _Pretrained
    faser: _Faser


def check_sizes(path: Path, files: Mapping[str, Any]) -> None:
    """Compare files with the manifest's {name: {"bytes", "sha256"}}; raise EngineFileError for the first mismatch."""
    for name, entry in files.items():
        try:
            size = (path / name).stat().st_size
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise EngineFileError(f"{name:.80} cannot be read in {path}: {reason_of(error)}; {_REBUILD}") from error
        if size != entry["bytes"]:
            raise EngineFileError(f"{name} in {path} has {size} bytes, the manifest says {entry['bytes']}; {_REBUILD}")


def hash_mismatches(path: Path, files: Mapping[str, Any], sha256: Callable[[Path], str] | None = None) -> Iterator[str]:
    """Yield a clause per file whose contents differ from the manifest. sha256: by default sha256_of."""
    for name, entry in files.items():
        try:
            digest = (sha256 or sha256_of)(path / name)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise EngineFileError(f"{name:.80} cannot be read in {path}: {reason_of(error)}; {_REBUILD}") from error
        if digest != entry["sha256"]:
            yield f"{name} in {path} has sha256 {digest[:12]}, the manifest says {entry['sha256'][:12]}"


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file (hex), which is read in chunks; OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = _read_object(path, MANIFEST_FILE, "this is not an engine directory; build one with faser build")
    if manifest.get("format") != MANIFEST_FORMAT:
        raise EngineFileError(
            f"{MANIFEST_FILE} in {path} has format {manifest.get('format')!r}, "
            f"this faser reads {MANIFEST_FORMAT}; {_REBUILD}"
        )
    files = manifest.get("files")
    whole = (
        isinstance(files, dict)
        and all(isinstance(e, dict) and isinstance(e.get("sha256"), str) and "bytes" in e for e in files.values())
        and isinstance(manifest.get("checkpoints"), dict)
        and "backend" in manifest
    )
    if not whole:
        raise EngineFileError(f"{MANIFEST_FILE} in {path} is damaged; {_REBUILD}")
    return manifest


def _read_engine_config(path: Path, role: str) -> tuple[dict[str, Any], _Limits]:
    name = f"{role}/{CONFIG_FILE}"
    found = _read_object(path, name, _REBUILD)
    try:
        return found, _EngineConfig.model_validate(found).build_config
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise EngineFileError(f"{name} in {path} has no valid {where} ({first['msg'].lower()}); {_REBUILD}") from error


def _read_object(path: Path, name: str, remedy: str) -> dict[str, Any]:
    try:
        data = parse_json((path / name).read_bytes())
    except OSError as error:
        raise EngineFileError(f"{name} cannot be read in {path} ({reason_of(error)}): {remedy}") from error
    except ValueError as error:
        raise EngineFileError(f"{name} in {path} is not valid JSON ({error}): {remedy}") from error
    if not isinstance(data, dict):
        raise EngineFileError(f"{name} in {path} must hold a JSON object; {_REBUILD}")
    return data


def _kv_bytes_per_token(config: Mapping[str, Any], itemsize: int | None) -> int:
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_size"]
    return int(values) * (itemsize or _KV_ITEMSIZES[config["dtype"]])
