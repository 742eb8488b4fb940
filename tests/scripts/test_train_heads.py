"""The training scripts of the demo target's draft heads, for a few steps: what they train are the published heads."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.heads.block import BlockWeights, load_block_config
from faser_trtllm.models.heads.eagle3 import Eagle3Weights, load_eagle3_config
from faser_trtllm.models.heads.medusa import MedusaWeights, is_medusa, load_medusa_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights
from tests.support.block_drafter_reference import TorchBlockDrafter
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


@pytest.fixture(scope="module")
def block_script() -> ModuleType:
    return importlib.import_module("engines.demo.train_block_drafter")


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


def make_drafter(block_script: ModuleType, target_dir: Path) -> Any:
    """With values that bf16 holds, and so large that attention matters."""
    torch.manual_seed(3)
    drafter = block_script.Drafter(block_script.load_target(target_dir), torch.full((3 * 64,), 0.5), 2, inner=48)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = 0.2 * torch.randn(parameter.shape) if parameter.dim() == 1 else 7 * parameter
            parameter.copy_((parameter + noise).bfloat16().float())
    return drafter


@torch.no_grad()
def assert_laws_are_published(block_script: ModuleType, drafter: Any, directory: Path, target_dir: Path) -> None:
    """Laws of the drafter, and of what is read again, are those of the reference that reads the checkpoint."""
    published, target = TorchBlockDrafter(directory, target_dir), block_script.load_target(target_dir)
    assert published.layers == block_script.LAYERS
    ids, anchors = torch.randint(2, 320, (2, 24)), torch.tensor([0, 1, 6, 16])
    features, _ = block_script.run_target(target, ids, block_script.LAYERS)
    for own in (drafter, block_script.load_drafter(directory, target)):
        found = torch.stack(list(block_script.logits_of(own, target, ids, anchors)), 2)
        found[..., block_script.MASK_TOKEN] = -torch.inf
        for row, (index, anchor) in itertools.product(range(2), enumerate(anchors.tolist())):
            wanted = published.logits(features[row, :anchor], ids[row, anchor].item(), [0] * 7)
            assert wanted.shape == (7, 320)
            assert torch.allclose(found[row, index].softmax(-1), wanted.softmax(-1), atol=1e-3)


def test_a_block_drafter_is_the_published_one(block_script: ModuleType, target_dir: Path, tmp_path: Path) -> None:
    drafter = make_drafter(block_script, target_dir)
    drafter.save(tmp_path)
    assert_laws_are_published(block_script, drafter, tmp_path, target_dir)


@pytest.mark.usefixtures("script")
def test_passes_follow_each_other() -> None:
    """Every second token is as drafted, and the passes begin there."""
    shared = sys.modules["head_training"]
    greedy = torch.arange(80)[None]
    proposals = greedy[:, 2:] * (torch.arange(78) % 2 == 0)
    assert shared.acceptance([proposals], greedy) == [0.5]
    assert shared.tokens_per_pass([proposals], greedy) == 2


@pytest.mark.usefixtures("few_steps")
def test_the_target_is_a_perfect_drafter(
    script: ModuleType,
    block_script: ModuleType,
    target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compare = importlib.import_module("engines.demo.compare_drafters")
    target = script.load_target(target_dir)
    arguments = ["--work", str(tmp_path / "work"), "--target", str(target_dir), "--draft", str(target_dir)]
    heads = {"eagle3": script.Head(target, torch.arange(96), torch.ones(3 * 64), inner=48)}
    for name, head in (heads | {"block": make_drafter(block_script, target_dir)}).items():
        (tmp_path / name).mkdir()
        head.save(tmp_path / name)
        arguments += [f"--{name}", str(tmp_path / name)]
    compare.main([*arguments, "--length", "32"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["`draft`", "`eagle3`", "`block`"]
    assert [float(share) for share in rows[0][1:]] == [8, *[1] * 7, 8]
    for row in rows[1:]:
        assert 1 <= float(row[1]) < 8
        assert 1 <= float(row[-1]) < 8


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


@ONLY_ALL
@pytest.mark.usefixtures("few_steps")
def test_a_block_drafter_stops_goes_on_and_loads(block_script: ModuleType, target_dir: Path, tmp_path: Path) -> None:
    run_twice(block_script, tmp_path, target_dir, "--num-layers", "2", "--inner", "48", "--anchors", "4")
    drafter = block_script.load_drafter(tmp_path, block_script.load_target(target_dir))
    assert_laws_are_published(block_script, drafter, tmp_path, target_dir)
    with CheckpointWeights(tmp_path) as files, CheckpointWeights(target_dir) as of_target:
        weights = BlockWeights(files, of_target, True)
        config = load_block_config(tmp_path, weights, load_model_config(target_dir))
    assert (config.layers, config.num_places, config.first_slot) == (block_script.LAYERS, 7, 1)
    assert config.mask_token_id == block_script.MASK_TOKEN
    assert config.causal == (False, False)
