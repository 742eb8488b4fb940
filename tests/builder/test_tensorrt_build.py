"""`faser build --backend tensorrt_rtx`: real plans, built without a GPU."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from faser_trtllm.builder import build, plan_file
from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.builder.plan_file import PlanFile
from faser_trtllm.builder.tensorrt_engine import TensorRTBackend
from faser_trtllm.errors import ConfigError, EngineFileError, FaserError, InvalidArgumentError
from tests.support.checkpoints import make_checkpoint, make_pair
from tests.support.networks import load_trt

pytestmark = pytest.mark.slow

trt = load_trt()


@pytest.fixture
def options(tmp_path: Path) -> BuildOptions:
    target, draft = make_pair(tmp_path / "checkpoints", num_layers=3)
    return BuildOptions(
        target,
        draft,
        tmp_path / "engines",
        backend="tensorrt_rtx",
        max_batch_size=4,
        max_num_tokens=160,
        max_seq_len=96,
        exit_layers=(1,),
    )


def assert_nothing_left(options: BuildOptions) -> None:
    assert sorted(path.name for path in options.output_dir.parent.iterdir()) == ["checkpoints"]


def test_an_engine_directory_of_plans(options: BuildOptions) -> None:
    steps: list[tuple[Any, ...]] = []
    engines = build_engines(options, lambda *step: steps.append(step))
    assert engines is not None
    assert engines == EngineDir.load(options.output_dir, verify_hashes=True)
    assert engines.backend == "tensorrt_rtx"
    assert engines.build_config == BuildConfig(4, 160, 96, 8, 96)
    config = engines.target_config
    assert {"version", "pretrained_config", "build_config", "faser"} == config.keys()
    assert config["build_config"]["kv_cache_type"] == "CONTINUOUS"
    with PlanFile.open(engines.target_path) as target, PlanFile.open(engines.draft_path) as draft:
        assert [(plan.info.first, plan.info.last) for plan in target.segments] == [(0, 1), (1, 3)]
        assert target.early_exit is not None
        assert draft.early_exit is None
        assert target.network.profile_rows == (128,)
        assert target.requirements.tensorrt_version == trt.__version__
        assert target.requirements.portable
        for file, role in ((target, "target"), (draft, "draft")):
            assert [plan.info.specification for plan in file.plans] == engines.manifest["specifications"][role]
            for plan in file.plans:
                assert plan.nbytes > 10_000
                with file.view(plan) as view:
                    assert bytes(view[:4]) == bytes(file.view(file.plans[0])[:4])  # TensorRT's own magic
                assert plan.info.profiles[1].keys() == {spec.name for spec in plan.info.inputs if spec.is_dynamic}
        rows = target.plans[0].info.profiles
        assert [profile["token_ids"][2] for profile in rows] == [(128,), (160,)]
    # A plan of so small a network may be done before its first phase is told.
    phases = {step[3] for step in steps}
    assert any(": " in phase and len(phase) > 20 for phase in phases), phases
    for role in ("target", "draft"):
        done = [step[1] for step in steps if step[0] == role]
        assert done == sorted(done)
        assert done[-1] == [step[2] for step in steps if step[0] == role][-1]


def test_the_same_build_is_done_once(options: BuildOptions) -> None:
    options = dataclasses.replace(options, draft_checkpoint_dir=None, exit_layers=())
    build_engines(options)
    inode = (options.output_dir / "target" / "rank0.engine").stat().st_ino
    build_engines(options, lambda *step: pytest.fail("built again"))
    assert (options.output_dir / "target" / "rank0.engine").stat().st_ino == inode
    build_engines(dataclasses.replace(options, compute_capabilities=("8.6",)))
    assert (options.output_dir / "target" / "rank0.engine").stat().st_ino != inode
    with PlanFile.open(options.output_dir / "target" / "rank0.engine") as file:
        assert file.requirements.compute_capabilities == ("8.6",)
        assert not file.requirements.portable


def test_another_network_is_another_engine(options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest holds the networks' specifications: a faser that makes other networks builds again."""
    options = dataclasses.replace(options, draft_checkpoint_dir=None, exit_layers=())
    build_engines(options)
    path = options.output_dir / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["specifications"]["target"][0] = "0" * 64
    path.write_text(json.dumps(manifest))
    built = []
    build_engines(options, lambda *step: built.append(step))
    assert built


def test_a_dry_run_makes_the_networks_and_writes_nothing(options: BuildOptions) -> None:
    assert build_engines(dataclasses.replace(options, dry_run=True)) is None
    assert_nothing_left(options)
    make_checkpoint(options.checkpoint_dir, num_layers=3)
    weights = options.checkpoint_dir / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(FaserError, match="truncated"):
        build_engines(dataclasses.replace(options, dry_run=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype is int8, the tensorrt_rtx backend builds bfloat16 or float16 or float32"),
        ({"tokens_per_block": 32}, "tokens_per_block is 32, tensorrt_rtx keeps each request's KV in one block of"),
        ({"compute_capabilities": ("8.7",)}, "compute_capability has 8.7, tensorrt_rtx .* builds for 7.5, 8.0, 8.6,"),
        (
            {"backend": "tensorrt", "compute_capabilities": ("9.0",)},
            "compute_capability is 9.0, but only the tensorrt_rtx",
        ),
    ],
)
def test_bad_options_are_named(options: BuildOptions, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        build_engines(dataclasses.replace(options, **changes))
    assert_nothing_left(options)


@pytest.mark.parametrize("backend", ["tensorrt_rtx", "tensorrt"])
def test_a_missing_tensorrt_is_named(options: BuildOptions, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setitem(sys.modules, backend, None)
    with pytest.raises(ConfigError, match=rf"{backend} cannot be imported .*install it with pip install") as caught:
        build_engines(dataclasses.replace(options, backend=backend))
    assert "\n" not in str(caught.value)
    assert_nothing_left(options)


def test_full_tensorrt_needs_its_gpu(options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    from faser_trtllm.ops.cuda import driver

    def no_driver() -> Any:
        raise ConfigError("libcuda.so.1 is missing; install an NVIDIA driver")

    monkeypatch.setattr(driver, "load_driver", no_driver)
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    with pytest.raises(ConfigError, match=r"libcuda\.so\.1 is missing"):
        build_engines(dataclasses.replace(options, backend="tensorrt"))


def test_full_tensorrt_builds_with_plugins_for_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the decisions before a network is made: the build needs a GPU (tests/engine/tensorrt/test_gpu.py)."""
    from faser_trtllm.ops.cuda import compiler, driver

    registered: list[Any] = []
    checked: list[int] = []
    full = SimpleNamespace(
        __name__="tensorrt", __version__="11.1.0", INetworkDefinition=SimpleNamespace(add_plugin=None)
    )
    plugins = SimpleNamespace(register=lambda trt, arch: registered.append((trt, arch)))
    monkeypatch.setitem(sys.modules, "tensorrt", full)
    monkeypatch.setitem(sys.modules, "faser_trtllm.builder.plugins", plugins)
    monkeypatch.setattr(driver, "device_arch", lambda: "sm_90")
    monkeypatch.setattr(driver, "driver_version", lambda: 13000)
    monkeypatch.setattr(compiler, "check_driver", checked.append)
    backend = TensorRTBackend.load("tensorrt", "bfloat16", ())
    assert checked == [13000]
    assert registered == [(full, "sm_90")]
    assert backend._requirements == plan_file.Requirements("tensorrt", "11.1.0", ("9.0",), portable=False)
    assert [backend.tokens_per_block(wanted, 96) for wanted in (None, 64)] == [32, 64]
    with pytest.raises(InvalidArgumentError, match="tokens_per_block is 24; it must be a multiple of 16"):
        backend.tokens_per_block(24, 96)


def test_a_build_that_fails_says_why(options: BuildOptions, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """fp32 attention has no kernel: with the decomposition turned off, the real builder refuses it."""
    from faser_trtllm.builder import tensorrt_engine

    real = tensorrt_engine.build_segment

    def without_decomposition(*args: Any) -> Any:
        segment = real(*args)
        for index in range(segment.network.num_layers):
            layer = segment.network.get_layer(index)
            if "decomposable" in dir(trt.IAttention) and layer.type == trt.LayerType.ATTENTION_OUTPUT:
                layer.__class__ = trt.IAttentionOutputLayer
                layer.attention.decomposable = False
        return segment

    monkeypatch.setattr(tensorrt_engine, "build_segment", without_decomposition)
    with (
        caplog.at_level(logging.CRITICAL),
        pytest.raises(FaserError, match=r"could not build layers 0 to 0: \w") as caught,
    ):
        build_engines(dataclasses.replace(options, dtype="float32"))
    assert "\n" not in str(caught.value)
    assert_nothing_left(options)


def test_ctrl_c_leaves_nothing_behind(options: BuildOptions) -> None:
    """In a process of its own: a real signal, while the real builder runs."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from faser_trtllm.builder.build import BuildOptions, build_engines\n"
        "def progress(what, done, total, phase=''):\n"
        "    print('building', flush=True)\n"
        "target, draft, output = map(Path, sys.argv[1:])\n"
        "build_engines(BuildOptions(target, draft, output, backend='tensorrt_rtx', max_seq_len=96), progress)\n"
    )
    target = make_checkpoint(options.checkpoint_dir.parent / "deep", num_layers=24)
    paths = [target, options.draft_checkpoint_dir, options.output_dir]
    root = str(Path(build.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, paths)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        for _ in range(3):  # impatient users press it again
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors
    assert process.returncode in (1, -signal.SIGINT)
    assert "FATAL" not in errors
    assert_nothing_left(options)


def test_plans_are_written_one_at_a_time(options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment's network, and so its weights, is gone before its plan is written."""
    import gc
    import weakref

    from faser_trtllm.builder import tensorrt_engine

    alive: list[Any] = []
    real_segment, real_add = tensorrt_engine.build_segment, plan_file.PlanFileWriter.add

    def build_segment(*args: Any) -> Any:
        segment = real_segment(*args)
        alive.append(weakref.ref(next(iter(segment.weights.values()))))
        return segment

    def add(self: Any, *args: Any) -> None:
        gc.collect()
        assert [each() for each in alive] == [None] * len(alive)
        real_add(self, *args)

    monkeypatch.setattr(tensorrt_engine, "build_segment", build_segment)
    monkeypatch.setattr(plan_file.PlanFileWriter, "add", add)
    build_engines(dataclasses.replace(options, dtype="float16", draft_checkpoint_dir=None))
    assert len(alive) == 4


def test_a_full_disk_is_noticed_before_building(options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: Usage)
    monkeypatch.setattr(TensorRTBackend, "write_engine", lambda *_: pytest.fail("built all the same"))
    with pytest.raises(EngineFileError, match="on a full disk"):
        build_engines(options)
    assert_nothing_left(options)
