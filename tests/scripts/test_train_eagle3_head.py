"""The training script of the demo target's EAGLE-3 head, for a few steps: what it trains is the published head."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.eagle3 import Eagle3Weights, load_eagle3_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights
from tests.support.checkpoints import make_checkpoint
from tests.support.eagle3 import TorchHead

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "faser_trtllm" / "core").glob("*.py"), key=lambda path: -path.stat().st_size)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train", ROOT / "engines" / "demo" / "train_eagle3_head.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    return make_checkpoint(directory, num_layers=8, tie=True, spelling="v4", rms_norm_eps=1e-5)


def test_it_reads_the_targets_hidden_rows(script: ModuleType, target_dir: Path) -> None:
    ids = list(range(5, 25))
    features, last = script.run_target(script.load_target(target_dir), torch.tensor([ids]))
    with CheckpointWeights(target_dir) as weights:
        rows = ReferenceModel(load_model_config(target_dir), weights).hidden_rows(ids)
    wanted = torch.cat([rows[layer] for layer in script.LAYERS], -1)
    assert torch.allclose(features[0], wanted, atol=1e-4 * wanted.abs().max().item())
    assert last.shape == (1, len(ids), 64)


def test_every_step_is_that_of_the_published_head(script: ModuleType, target_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    target = script.load_target(target_dir)
    draft_ids = torch.randperm(320)[:96].sort().values
    head = script.Head(target, draft_ids, torch.full((3 * 64,), 0.5), inner=48)
    with torch.no_grad():
        for parameter in head.parameters():  # what bf16 holds, and large enough that attention matters
            parameter.copy_((parameter * (1 if parameter.dim() == 1 else 8)).bfloat16().float())
    head.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    published = TorchHead(tensors, json.loads((tmp_path / "config.json").read_text()), target.embed.weight.detach())
    ids, num_steps = torch.randint(2, 320, (1, 14)), 3
    features, _ = script.run_target(target, ids)
    rows = torch.tensor([0, 4, 10])
    with torch.no_grad():
        found = head(features, target.embed(ids), num_steps, rows)
        of_target = published.features(features[0])
        for step, logits in enumerate(found):
            for index, row in enumerate(range(11) if step == 0 else rows.tolist()):
                inputs = of_target[: row + 1]
                for more in range(step + 1):
                    outputs, wanted = published.forward(inputs, ids[0, 1 : row + 2 + more].tolist())
                    inputs = torch.cat([inputs, outputs[-1:]])
                wanted = wanted[-1, draft_ids]
                assert torch.allclose(logits[0, index], wanted, atol=1e-3 * wanted.abs().max().item())


def test_it_stops_goes_on_and_writes_a_head_that_loads(
    script: ModuleType, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a step takes 0.2 s."""
    clock = itertools.count(0.0, 0.2)
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(script, "library_files", lambda root: SOURCES)
    arguments = ["--out", str(tmp_path), "--target", str(target_dir), "--draft-vocab", "96", "--inner", "48"]
    arguments += ["--length", "32", "--batch", "4", "--save-minutes", "0.01", "--minutes"]
    steps = []
    for minutes in ("0.02", "0.04"):
        script.main([*arguments, minutes])
        curve = json.loads((tmp_path / "metrics.json").read_text())["curve"]
        assert [entry["tokens"] for entry in curve] == [entry["step"] * 4 * 32 for entry in curve]
        steps.append([entry["step"] for entry in curve])
    assert steps[1][: len(steps[0])] == steps[0]
    assert len(steps[1]) > len(steps[0]) > 2
    with CheckpointWeights(tmp_path) as files, CheckpointWeights(target_dir) as of_target:
        weights = Eagle3Weights(files, of_target)
        config = load_eagle3_config(tmp_path, weights, load_model_config(target_dir))
        assert config.layers == script.LAYERS
        assert (weights.target_ids(96, 320) < 320).all()
