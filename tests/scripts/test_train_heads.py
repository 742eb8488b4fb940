"""The training scripts of the demo target's draft heads, for a few steps: what they train are the published heads."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.heads.eagle3 import Eagle3Weights, load_eagle3_config
from faser_trtllm.models.heads.medusa import MedusaWeights, is_medusa, load_medusa_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights
from tests.support.checkpoints import make_checkpoint
from tests.support.eagle3 import TorchHead
from tests.support.effort import ONLY_ALL
from tests.support.medusa import TorchMedusa

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "faser_trtllm" / "core").glob("*.py"), key=lambda path: -path.stat().st_size)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("engines.demo.train_eagle3_head")


@pytest.fixture(scope="module")
def medusa_script() -> ModuleType:
    return importlib.import_module("engines.demo.train_medusa_heads")


@pytest.fixture
def few_steps(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little text, and a clock on which a step takes 0.2 s."""
    shared, clock = sys.modules["head_training"], itertools.count(0.0, 0.2)
    monkeypatch.setattr(shared, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(shared, "library_files", lambda root: SOURCES)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    return make_checkpoint(directory, num_layers=8, tie=True, spelling="v4", rms_norm_eps=1e-5)


def test_it_reads_the_targets_hidden_rows(script: ModuleType, target_dir: Path) -> None:
    ids = list(range(5, 25))
    features, last = script.run_target(script.load_target(target_dir), torch.tensor([ids]), script.LAYERS)
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
    features, _ = script.run_target(target, ids, script.LAYERS)
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


def test_medusa_heads_are_the_published_ones(medusa_script: ModuleType, target_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    target = medusa_script.load_target(target_dir)
    heads = medusa_script.Heads(target, 3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_((parameter + 0.2 * torch.randn(parameter.shape)).bfloat16().float())
    heads.save(tmp_path)
    published = TorchMedusa(tmp_path, target_dir)
    ids = torch.randint(2, 320, (1, 14))
    with torch.no_grad():
        rows, last = medusa_script.run_target(target, ids, (8,))
        for position in range(14):
            found = torch.stack([logits[0, position] for logits in heads(last)])
            wanted = published.logits(rows[0, position])
            assert torch.allclose(found, wanted, atol=1e-4 * wanted.abs().max().item())


def run_twice(script: ModuleType, out: Path, target_dir: Path, *more: str) -> None:
    """In two runs, of which the second goes on."""
    arguments = ["--out", str(out), "--target", str(target_dir), *more, "--length", "32", "--batch", "4"]
    steps = []
    for minutes in ("0.02", "0.04"):
        script.main([*arguments, "--save-minutes", "0.01", "--minutes", minutes])
        curve = json.loads((out / "metrics.json").read_text())["curve"]
        assert [entry["tokens"] for entry in curve] == [entry["step"] * 4 * 32 for entry in curve]
        assert all(0 <= share <= 1 for entry in curve for share in entry["greedy_by_place"])
        steps.append([entry["step"] for entry in curve])
    assert steps[1][: len(steps[0])] == steps[0]
    assert len(steps[1]) > len(steps[0]) > 2


@ONLY_ALL
@pytest.mark.usefixtures("few_steps")
def test_a_head_stops_goes_on_and_loads(script: ModuleType, target_dir: Path, tmp_path: Path) -> None:
    run_twice(script, tmp_path, target_dir, "--draft-vocab", "96", "--inner", "48")
    with CheckpointWeights(tmp_path) as files, CheckpointWeights(target_dir) as of_target:
        weights = Eagle3Weights(files, of_target)
        config = load_eagle3_config(tmp_path, weights, load_model_config(target_dir))
        assert config.layers == script.LAYERS
        assert (weights.target_ids(96, 320) < 320).all()


@ONLY_ALL
@pytest.mark.usefixtures("few_steps")
def test_medusa_heads_stop_go_on_and_load(medusa_script: ModuleType, target_dir: Path, tmp_path: Path) -> None:
    run_twice(medusa_script, tmp_path, target_dir, "--num-heads", "2")
    assert is_medusa(tmp_path)
    with CheckpointWeights(tmp_path) as files:
        config = load_medusa_config(tmp_path, MedusaWeights(files), load_model_config(target_dir))
    assert config.num_heads == 2
