"""An engine directory in fp8 whose networks are interpreted from its checkpoints, with the scales that it records."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models import calibration
from lab.interpreted.open import Interpretation
from tests.support.checkpoints import make_pair
from tests.support.executor_harness import Collector
from tests.support.networks import load_trt

pytestmark = pytest.mark.slow

PROMPTS = [np.random.default_rng(seed).integers(2, 320, 5 + seed).tolist() for seed in range(4)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), num_layers=3, draft_layers=2)


def build(pair: tuple[Path, Path], output: Path, **changes: str) -> EngineDir:
    load_trt()
    options = BuildOptions(
        *pair,
        output,
        "tensorrt_rtx",
        dtype="float32",
        max_batch_size=4,
        max_num_tokens=96,
        max_seq_len=48,
        exit_layers=(1,),
        **changes,
    )
    engines = build_engines(options)
    assert engines is not None
    return engines


def tokens_of(engines: EngineDir, pair: tuple[Path, Path], speculation: str) -> list[list[int]]:
    collector = Collector()
    config = ExecutorConfig(speculation=speculation)
    with open_executor(engines.path, config, opener=Interpretation(*pair)) as executor:
        for index, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=8, temperature=0.7 * (index % 2), seed=index, end_ids=())
            executor.submit(str(index), prompt, params, collector.sink(str(index)))
        while executor.step():
            pass
    return [collector.tokens[str(index)] for index in range(len(PROMPTS))]


def rescale(engines: EngineDir, factor: float) -> None:
    """Change the target's recorded scales behind the manifest's back."""
    path = engines.path / "target" / "config.json"
    config = json.loads(path.read_text())
    recorded = config["faser"]["quantization"]
    recorded["input_scales"] = {name: factor * scale for name, scale in recorded["input_scales"].items()}
    path.write_text(json.dumps(config))
    manifest = json.loads((engines.path / "manifest.json").read_text())
    manifest["files"]["target/config.json"]["bytes"] = path.stat().st_size
    (engines.path / "manifest.json").write_text(json.dumps(manifest))


def test_it_speaks_with_the_scales_of_the_build(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded, with and without speculation; nothing is calibrated a second time."""
    engines = build(pair, tmp_path / "fp8", quantization="FP8", draft_quantization="FP8")
    plain = build(pair, tmp_path / "plain")
    monkeypatch.setattr(calibration, "NUM_WINDOWS", 0)  # would leave every scale out
    alone = tokens_of(engines, pair, "off")
    assert tokens_of(engines, pair, "fixed:3") == alone
    assert tokens_of(plain, pair, "off") != alone
    rescale(engines, 16)
    assert tokens_of(EngineDir.load(engines.path), pair, "off") != alone
