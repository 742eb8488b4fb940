"""The registry of backends: names, and directories of backends that there are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from faser_trtllm.backends import BACKENDS, find_backend
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.errors import ConfigError, EngineFileError, InvalidArgumentError
from faser_trtllm.executor.factory import open_executor
from lab.interpreted.open import Interpretation
from tests.support.engine_dirs import make_engine_dir


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_dir(tmp_path_factory.mktemp("backends"), num_layers=1, max_seq_len=64)


def relabel(engine_dir: Path, backend: str) -> None:
    path = engine_dir / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"backend": backend}))


def test_a_name_finds_its_backend_and_another_is_refused_with_all_names() -> None:
    assert [find_backend(backend.name) for backend in BACKENDS] == list(BACKENDS)
    with pytest.raises(InvalidArgumentError) as error:
        find_backend("opencl")
    assert str(error.value) == "backend opencl is unknown; use cpu or cuda or tensorrt_rtx or tensorrt"


def test_a_directory_of_an_unknown_backend_is_refused(engine_dir: Path) -> None:
    relabel(engine_dir, "opencl")
    try:
        with pytest.raises(EngineFileError, match=r"backend opencl is unknown; use .*; rebuild it with faser build"):
            open_executor(engine_dir, ExecutorConfig())
    finally:
        relabel(engine_dir, "cpu")


def test_what_a_backend_cannot_do_is_refused_by_name(engine_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"backend is cpu in .*, only engines of tensorrt_rtx can be interpreted"):
        open_executor(engine_dir, ExecutorConfig(), opener=Interpretation(engine_dir))
    with pytest.raises(ConfigError, match=r"holds cpu engines, .* build with --backend cuda"):
        open_executor(engine_dir, ExecutorConfig(quantization="fp8"))
    with pytest.raises(
        ConfigError, match=r"^gpu_partitions is streams, .* holds cpu engines, which run on cores; leave it out"
    ):
        open_executor(engine_dir, ExecutorConfig(gpu_partitions="streams"))
    relabel(engine_dir, "tensorrt")
    with pytest.raises(ConfigError, match=r"holds tensorrt engines, .* build with --quantization FP8"):
        open_executor(engine_dir, ExecutorConfig(quantization="fp8"))
    relabel(engine_dir, "cpu")


def test_only_backends_whose_rows_can_be_alone_are_deterministic(engine_dir: Path) -> None:
    """The CPU backend is always deterministic."""
    config = ExecutorConfig(deterministic=True)
    with open_executor(engine_dir, config):
        pass
    relabel(engine_dir, "tensorrt")
    try:
        with pytest.raises(
            ConfigError, match=r"^deterministic is true, .* holds tensorrt engines, whose products"
        ) as error:
            open_executor(engine_dir, config)
    finally:
        relabel(engine_dir, "cpu")
    assert str(error.value).endswith("set it to false or build with --backend cpu or cuda")


def test_a_backend_without_token_trees_says_so(engine_dir: Path) -> None:
    for backend in ("tensorrt", "tensorrt_rtx"):
        relabel(engine_dir, backend)
        with pytest.raises(
            ConfigError, match=f"num_branches is 2, .* holds {backend} engines, .* chains only"
        ) as error:
            open_executor(engine_dir, ExecutorConfig(num_branches=2, speculation="fixed:2"))
        assert str(error.value).endswith("set it to 0 or build with --backend cpu or cuda")
    relabel(engine_dir, "cpu")
