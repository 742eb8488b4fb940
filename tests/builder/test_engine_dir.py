"""Engine directories whose JSON files are not what `faser build` writes: an error in one sentence."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.errors import EngineFileError

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "head_size": 16,
    "max_position_embeddings": 96,
    "dtype": "bfloat16",
    "mapping": {"tp_size": 1},
}
LIMITS = {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 96, "max_draft_len": 3}


def config(**faser: Any) -> dict[str, Any]:
    build = LIMITS | {"plugin_config": {"tokens_per_block": 16}}
    return {"build_config": build, "pretrained_config": copy.deepcopy(SIZES), "faser": faser}


def write(path: Path, target: Any, draft: Any, **manifest: Any) -> Path:
    files = {}
    for role, content in (("target", target), ("draft", draft)):
        (path / role).mkdir()
        data = json.dumps(content).encode()
        (path / role / "config.json").write_bytes(data)
        files[f"{role}/config.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    whole = {"format": 1, "files": files, "checkpoints": {"target": {}, "draft": {}}, "backend": "cpu"} | manifest
    (path / "manifest.json").write_text(json.dumps(whole))
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    found = EngineDir.load(write(tmp_path, config(), config(eagle3={"num_features": 64, "layers": [0, 1]})), True)
    assert found.build_config == BuildConfig(4, 64, 96, 3, 16)
    assert (found.vocab_size, found.tp_size, found.draft_head, found.read_layers) == (64, 1, "eagle3", (0, 1))
    assert found.kv_bytes_per_token() == 2 * (2 * 2 * 16 * 2) + 64 * 4


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (lambda c: c["pretrained_config"].pop("vocab_size"), "pretrained_config.vocab_size"),
        (lambda c: c["pretrained_config"].update(num_key_value_heads="many"), "pretrained_config.num_key_value_heads"),
        (lambda c: c["pretrained_config"].update(head_size=10**4000), "pretrained_config.head_size"),
        (lambda c: c["pretrained_config"].update(dtype=["bfloat16"]), "pretrained_config.dtype"),
        (lambda c: c["pretrained_config"].update(mapping=1), "pretrained_config.mapping"),
        (lambda c: c["pretrained_config"]["mapping"].update(tp_size=0), "pretrained_config.mapping.tp_size"),
        (lambda c: c["build_config"].update(plugin_config=None), "build_config.plugin_config"),
        (lambda c: c["build_config"].update(max_seq_len=0), "build_config.max_seq_len"),
        (lambda c: c.pop("faser"), "faser"),
        (lambda c: c["faser"].update(eagle3={"num_features": {}}), "faser.eagle3.num_features"),
        (lambda c: c["faser"].update(mtp=5), "faser.mtp"),
        (lambda c: c["faser"].update(eagle3=None), "faser.eagle3"),
    ],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_damaged_config_gets_a_sentence(
    tmp_path: Path, damage: Callable[[dict[str, Any]], Any], where: str, role: str
) -> None:
    configs = {"target": config(), "draft": config()}
    damage(configs[role])
    with pytest.raises(EngineFileError, match=rf"{role}/config\.json in .* has no valid {where} .*; rebuild") as caught:
        EngineDir.load(write(tmp_path, **configs))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "files",
    [{"a\0b": {"bytes": 1, "sha256": ""}}, {"a": {"bytes": 1, "sha256": None}}, {"a": {"bytes": 1, "sha256": ""}}],
)
def test_a_damaged_manifest_gets_a_sentence(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(EngineFileError, match=r"manifest\.json in .* is damaged|cannot be read in"):
        EngineDir.load(write(tmp_path, config(), config(), files=files))
