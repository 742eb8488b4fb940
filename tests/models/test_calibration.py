"""Scales of activations: the largest inputs of every matrix, as the reference sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_trtllm.errors import CheckpointError, ConfigError, InvalidArgumentError
from faser_trtllm.models import calibration
from faser_trtllm.models.calibration import calibrate_input_scales, calibration_text
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights, Dtype
from tests.support.checkpoints import make_checkpoint

TOKEN_IDS = np.random.default_rng(0).integers(0, 320, 600).tolist()


class Recorded(ReferenceModel):
    """All inputs of every matrix, by its name."""

    def __init__(self, directory: Path) -> None:
        super().__init__(load_model_config(directory), CheckpointWeights(directory))
        self.inputs: dict[str, list[torch.Tensor]] = {}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.inputs.setdefault(name, []).append(x)
        return super().linear(name, x)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "c", dtype="float32", num_layers=2)


def test_scales_are_the_largest_inputs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "WINDOW_TOKENS", 128)
    reference = Recorded(directory)
    for start in range(0, 512, 128):
        reference.hidden_rows(TOKEN_IDS[start : start + 128])
    with CheckpointWeights(directory) as weights:
        scales = calibrate_input_scales(load_model_config(directory), weights, TOKEN_IDS)
    assert len(scales) == 2 * 7
    for name, inputs in reference.inputs.items():
        assert len(inputs) == 4
        assert scales[name] == np.float32(float(torch.cat(inputs).abs().max()) / 448)
    assert scales["model.layers.1.self_attn.q_proj"] == scales["model.layers.1.self_attn.v_proj"]
    assert scales["model.layers.0.mlp.down_proj"] != scales["model.layers.1.mlp.down_proj"]


def test_inputs_that_are_no_numbers_are_named(directory: Path) -> None:
    class Broken(CheckpointWeights):
        def read(self, name: str, dtype: Dtype) -> np.ndarray:
            found = super().read(name, dtype)
            return found * np.float32(np.inf) if name.endswith("1.input_layernorm.weight") else found

    with Broken(directory) as weights, pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj are not"):
        calibrate_input_scales(load_model_config(directory), weights, TOKEN_IDS)


def test_a_missing_torch_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    with CheckpointWeights(directory) as weights, pytest.raises(ConfigError, match="install torch, or build from"):
        calibrate_input_scales(load_model_config(directory), weights, TOKEN_IDS)


def test_texts(tmp_path: Path) -> None:
    assert len(calibration_text(None)) > 10_000
    file = tmp_path / "text"

    def refused(write: Callable[[], object]) -> str:
        write()
        with pytest.raises(InvalidArgumentError) as caught:
            calibration_text(file)
        return str(caught.value)

    assert "which cannot be read (No such file" in refused(lambda: None)
    assert "which is empty; name a file with some text" in refused(lambda: file.write_text(" \n"))
    assert "which cannot be read" in refused(lambda: file.write_bytes(b"\xff"))
    file.write_text("some text")
    assert calibration_text(file) == "some text"
