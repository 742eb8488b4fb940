"""The training script of the larger pair, for a few steps on the CPU: it stops, goes on, and writes checkpoints."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.gpu.models.enlarge import DecoderShape, enlarge_config
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.models.weights import CheckpointWeights, check_shapes, expected_shapes

SOURCES = Path(__file__).parents[4] / "faser_trtllm" / "core"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("engines.train_gpu_pair")


@pytest.fixture
def small(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Little text, short measurements, and a clock by which a step takes 0.2 s whatever the machine does."""
    clock = itertools.count(0.0, 0.2)
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(script, "library_files", lambda root: sorted(SOURCES.glob("b*.py")))
    monkeypatch.setattr(script, "measure", lambda target, draft, data: {"measured_on": len(data)})
    return script


def arguments(out: Path, *more: str) -> list[str]:
    sizes = ["--vocab", "400", "--target", "32,2,2,1,48", "--draft", "16,1,1,1,24", "--batch", "2", "--length", "32"]
    times = ["--target-minutes", "0.02", "--draft-minutes", "0.01"]
    return ["--out", str(out), *sizes, *times, "--root", str(SOURCES), "--device", "cpu", *more]


def test_it_stops_goes_on_and_writes_checkpoints_that_load(small: ModuleType, tmp_path: Path) -> None:
    assert small.main(arguments(tmp_path, "--stop-after", "0.000001")) == 3
    first = torch.load(tmp_path / "work" / "target.pt", weights_only=True)
    assert first["progress"][0] == 1
    assert not (tmp_path / "target").exists()
    assert small.main(arguments(tmp_path)) == 0
    steps, elapsed_s, num_tokens = torch.load(tmp_path / "work" / "target.pt", weights_only=True)["progress"]
    assert steps > 1
    assert elapsed_s >= 1.2
    assert num_tokens == steps * 64
    for name, hidden in (("target", 32), ("draft", 16)):
        config = load_model_config(tmp_path / name)
        assert (config.hidden_size, config.vocab_size) == (hidden, 400)
        with CheckpointWeights(tmp_path / name) as weights:
            check_shapes(weights, expected_shapes(config))
            assert (
                np.abs(weights.float32("model.layers.0.mlp.up_proj.weight", (config.intermediate_size, hidden))).max()
                > 0
            )
        assert Tokenizer.load(tmp_path / name).encode("def", add_special_tokens=False)
    enlarge_config(load_model_config(tmp_path / "target"), DecoderShape(64, 96, 4, 4, 2, 32))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["target"]["tokens_seen"] == num_tokens
    assert small.main(arguments(tmp_path)) == 0  # all is done: nothing is trained again
    assert torch.load(tmp_path / "work" / "target.pt", weights_only=True)["progress"][0] == steps


def test_going_on_is_as_if_never_stopped(small: ModuleType, tmp_path: Path) -> None:
    """Weights, momentum and the optimizer's state come back bit for bit."""
    torch.manual_seed(0)
    sizes = small.parse_sizes("32,2,2,1,48", 100)
    data = torch.randint(0, 100, (4000,))
    model = small.Llama(sizes)
    run = small.Training("target", model, tmp_path, 1.0)
    for _ in range(2):
        run._one_step(data, 2, 16, "cpu")
    run.step = 2
    run._save()
    other = small.Training("target", small.Llama(sizes), tmp_path, 1.0)
    for each in (run, other):
        torch.manual_seed(5)
        each.elapsed_s = 0.0
        each._one_step(data, 2, 16, "cpu")
    for left, right in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_files_of_prompts_and_duplicates_are_not_trained_on(small: ModuleType, tmp_path: Path) -> None:
    for name in ("a", "copy"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    held = (SOURCES / "batch.py").read_text()
    (tmp_path / "also_held.py").write_text(held)
    training, held_out = small.collect_texts([tmp_path], 1 << 20)
    assert training == ["x = 1\n"]
    assert held in held_out


def test_checkpoints_are_split_below_a_size(script: ModuleType, tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(100, 100) for i in range(7)}
    script.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    files = script.split_checkpoint(tmp_path, 100_000)
    assert len(files) == 4
    assert all(file.stat().st_size < 100_000 for file in files)
    with CheckpointWeights(tmp_path) as weights:
        for name, tensor in tensors.items():
            assert np.array_equal(weights.float32(name, (100, 100)), tensor.numpy())
    script.save_file({"big": torch.zeros(100, 300)}, tmp_path / "model.safetensors")
    with pytest.raises(SystemExit, match="tensor big has"):
        script.split_checkpoint(tmp_path, 100_000)


def test_the_default_pair_has_the_sizes_it_promises(script: ModuleType) -> None:
    for text, low, high in (("512,9,8,4,1408", 30e6, 33e6), ("128,3,2,2,384", 1e6, 2e6)):
        model = script.Llama(script.parse_sizes(text, 8192))
        assert low < sum(p.numel() for p in model.parameters()) < high
    with pytest.raises(SystemExit, match="five whole numbers"):
        script.parse_sizes("1,2", 8)
