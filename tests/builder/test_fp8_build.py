"""`faser build --quantization FP8`: real plans of TensorRT for RTX, and fp8 checkpoints multiplied as they are stored.

Plans are built and read, networks interpreted on the CPU; nothing runs on a GPU.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.builder.network.fp8 import CheckpointLayers
from faser_trtllm.builder.network.fp8_recipe import Fp8Recipe, recorded_scales
from faser_trtllm.builder.plan_file import PlanFile
from faser_trtllm.builder.source import open_sources
from faser_trtllm.builder.tensorrt_engine import TensorRTBackend
from faser_trtllm.errors import CheckpointError, InvalidArgumentError
from lab.interpreted.engine import InterpretedEngine
from tests.support.checkpoints import make_checkpoint, make_pair
from tests.support.eagle3 import make_head
from tests.support.effort import ONLY_ALL, pick
from tests.support.fp8_reference import FUSED, Fp8Reference, largest_of_groups, rounded_once, through_e4m3
from tests.support.fp8_writer import write_fp8
from tests.support.networks import load_trt
from tests.support.networks import options as network_options
from tests.support.scenario import RAGGED, Scenario

pytestmark = pytest.mark.slow

trt = load_trt()
NUM_LAYERS = 3
PARTS = [part for group in FUSED for part in group]
NAMES = [f"model.layers.{layer}.{part}" for layer in range(NUM_LAYERS) for part in PARTS]


def options_in(folder: Path) -> BuildOptions:
    target, draft = make_pair(folder / "checkpoints", num_layers=NUM_LAYERS)
    return BuildOptions(
        target,
        draft,
        folder / "engines",
        backend="tensorrt_rtx",
        max_batch_size=4,
        max_num_tokens=160,
        max_seq_len=96,
        exit_layers=(1,),
        quantization="FP8",
    )


@pytest.fixture
def options(tmp_path: Path) -> BuildOptions:
    return options_in(tmp_path)


def built(options: BuildOptions, **changes: Any) -> EngineDir:
    engines = build_engines(dataclasses.replace(options, **changes))
    assert engines is not None
    return engines


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    """The pair as the options say, to be read only."""
    return built(options_in(tmp_path_factory.mktemp("pair")))


def products(path: Path) -> dict[str, set[tuple[str, ...]]]:
    """The types of both operands of every GEMM by its layer's name, from the listing that plans of TensorRT for RTX 1.7
    carry: its inspector, which would say the same, needs a GPU."""
    found: dict[str, set[tuple[str, ...]]] = {}
    with PlanFile.open(path) as file:
        for plan in file.plans:
            with file.view(plan) as view:
                text = bytes(view)
            types = dict(re.findall(rb'tensor=\{[^\n]*? name="([^"]+)"[^\n]*? type=(\w+) \}', text))
            gemms = re.findall(rb'fully_connected=\{ name="([^"]+)"[^\n]*? input=\{([^}]*)\}', text)
            for name, inputs in gemms:
                operands = re.findall(rb'"([^"]+)"', inputs)[:2]
                layer = name.decode().removesuffix(" [profile 1]")
                found.setdefault(layer, set()).add(tuple(types[operand].decode() for operand in operands))
    return found


def test_plans_multiply_e4m3_by_e4m3(engines: EngineDir) -> None:
    target, draft = products(engines.target_path), products(engines.draft_path)
    layers = {name: kinds for name, kinds in target.items() if name.startswith("model.layers.")}
    fused = {f"{group[0]}{''.join('+' + part.partition('.')[2] for part in group[1:])}" for group in FUSED}
    assert layers.keys() == {f"model.layers.{layer}.{name}" for layer in range(NUM_LAYERS) for name in fused}
    assert set().union(*layers.values()) == {("fp8_e4m3", "fp8_e4m3")}
    assert target["lm_head"] == {("bf16", "bf16")}
    assert set().union(*draft.values()) == {("bf16", "bf16")}


def test_scales_per_output_are_multiplied_in_fp8_too(options: BuildOptions, tmp_path: Path) -> None:
    directory, _ = write_fp8(options.checkpoint_dir, tmp_path / "channel", "compressed-tensors-channel")
    found = products(built(options, checkpoint_dir=directory, draft_checkpoint_dir=None).target_path)
    layers = [kinds for name, kinds in found.items() if name.startswith("model.layers.")]
    assert len(layers) == 4 * NUM_LAYERS
    assert set().union(*layers) == {("fp8_e4m3", "fp8_e4m3")}


def test_what_is_written_says_so(engines: EngineDir) -> None:
    recorded = engines.target_config["faser"]["quantization"]
    assert recorded["quant_algo"] == "FP8"
    assert recorded["exclude_modules"] == ["lm_head"]
    assert len(recorded["calibration_sha256"]) == 64
    assert sorted(recorded_scales(engines.target_config) or {}) == sorted(NAMES)
    assert engines.draft_config is not None
    assert recorded_scales(engines.draft_config) is None
    with PlanFile.open(engines.target_path) as file:
        assert file.requirements.compute_capabilities == ("8.9", "12.0")


def test_the_same_build_is_done_once(options: BuildOptions) -> None:
    inode = built(options).target_path.stat().st_ino
    assert built(options, quantization="fp8").target_path.stat().st_ino == inode


def test_another_text_gives_other_scales(options: BuildOptions, engines: EngineDir, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("some other text")
    other = recorded_scales(built(options, calib_dataset=text).target_config)
    assert other is not None
    assert recorded_scales(engines.target_config) not in (None, other)


@ONLY_ALL
def test_a_draft_is_quantized_alone(options: BuildOptions) -> None:
    engines = built(options, quantization="none", draft_quantization="FP8")
    assert recorded_scales(engines.target_config) is None
    assert engines.draft_config is not None
    assert recorded_scales(engines.draft_config) is not None


def test_a_plan_of_large_matrices_is_little_more_than_half(options: BuildOptions, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
    num_layers = pick(2, 6)
    directory = make_checkpoint(tmp_path / "large", num_layers=num_layers, dtype="bfloat16", **sizes)
    plain = dataclasses.replace(
        options, checkpoint_dir=directory, draft_checkpoint_dir=None, exit_layers=(), max_num_tokens=128
    )
    in_fp8, in_bf16 = (built(plain, quantization=name).target_path.stat().st_size for name in ("FP8", "none"))
    matrices = num_layers * (512 * (512 + 2 * 256) + 512 * 512 + 3 * 512 * 2048)
    assert in_bf16 - in_fp8 > 0.75 * matrices


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"compute_capabilities": ("8.9", "8.6")},
            "quantization is FP8 and compute_capability 8.6, fp8 products begin",
        ),
        ({"calib_dataset": Path("missing")}, "calib_dataset is missing, which cannot be read"),
        ({"quantization": "int8"}, "int8, which tensorrt_rtx engines do not hold; leave it out or use --backend cpu"),
    ],
)
def test_what_cannot_be_is_named(options: BuildOptions, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        build_engines(dataclasses.replace(options, **changes))
    assert "\n" not in str(caught.value)
    assert not options.output_dir.exists()


def test_a_head_stays_as_it_is(options: BuildOptions, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", num_layers=4, head_dim=64)
    head = make_head(tmp_path / "head", target)
    with_head = dataclasses.replace(
        options, checkpoint_dir=target, draft_checkpoint_dir=head, draft_quantization="FP8", dry_run=True
    )
    with pytest.raises(InvalidArgumentError, match="draft_quantization is FP8, but the draft is an EAGLE-3 head"):
        build_engines(with_head)
    assert build_engines(dataclasses.replace(with_head, draft_quantization="none")) is None


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from faser_trtllm.ops.cuda import compiler, driver

    full = SimpleNamespace(__name__="tensorrt", __version__="11.1.0", INetworkDefinition=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "tensorrt", full)
    monkeypatch.setattr(driver, "device_arch", lambda: "sm_86")
    monkeypatch.setattr(driver, "driver_version", lambda: 13000)
    monkeypatch.setattr(compiler, "check_driver", lambda version: None)
    TensorRTBackend.load("tensorrt", "bfloat16", ())
    with pytest.raises(InvalidArgumentError, match=r"compute_capability 8\.6, fp8 products begin at 8\.9"):
        TensorRTBackend.load("tensorrt", "bfloat16", (), Fp8Recipe(frozenset({"target"})))


# fp8 checkpoints, interpreted -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain") / "c"
    return make_checkpoint(directory, dtype="float32", num_layers=NUM_LAYERS, intermediate_size=160)


def static_scales() -> dict[str, float]:
    """Different ones for all matrices, near what activations need."""
    rng = np.random.default_rng(3)
    return {name: float(np.float32(0.01 * 2 ** rng.uniform(-1, 1))) for name in NAMES}


def write_static(plain: Path, directory: Path, kind: str) -> tuple[Path, dict[str, torch.Tensor], dict[str, float]]:
    """An fp8 checkpoint with static scales of inputs -> its folder, the matrices it stands for, and the scales."""
    scales = static_scales()
    shape = (1,) if kind.startswith("compressed") else ()
    more = {f"{name}.input_scale": torch.full(shape, scale) for name, scale in scales.items()}
    folder, exact = write_fp8(plain, directory, kind, more)
    return folder, {name: torch.from_numpy(exact[f"{name}.weight"]) for name in NAMES}, scales


def stored_scale(folder: Path, name: str) -> float:
    from safetensors.torch import load_file

    return float(load_file(folder / "model.safetensors")[f"{name}.weight_scale"])


def rounded_to_the_largest(folder: Path, matrices: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Where matrices that are multiplied as one have a scale each, all take the largest."""
    largest = largest_of_groups({name: stored_scale(folder, name) for name in NAMES})
    return {name: through_e4m3(matrix, largest[name]) for name, matrix in matrices.items()}


def share_of_equal_rows(
    folder: Path, matrices: Mapping[str, torch.Tensor], scales: Mapping[str, float] | None
) -> float:
    """Return the share of rows in ragged pruned steps whose logits match the reference's up to fp32's rounding. The
    other rows have an input that rounds to the other side of a tie. scales: of the reference's inputs; None: the
    recipe's."""
    with ExitStack() as stack:
        (source,) = open_sources(folder, None, 1, (), stack)
        found = Fp8Recipe(frozenset({"target"}), "def f(x): return x\n" * 20).input_scales(
            source.config, source.weights, source.checkpoint.tokenizer
        )
        fp8 = CheckpointLayers(source.weights, found)
        sizes = network_options(max_seq_len=96, tokens_per_block=96)
        engine = InterpretedEngine(trt, source.config, source.weights, sizes, (1, 2), fp8)
        reference = Fp8Reference(source.config, source.weights, matrices, largest_of_groups(scales or found))
        scenario = Scenario(engine, reference)
        pairs = [scenario.step(step) for step in RAGGED]
    errors = np.concatenate([np.abs(logits - expected).max(1) for logits, expected in pairs])
    return float((errors < 1e-4).mean())


@pytest.mark.parametrize("kind", ["modelopt", "modelopt-own-file", "compressed-tensors", "autofp8"])
def test_static_scales_are_the_checkpoints(plain: Path, tmp_path: Path, kind: str) -> None:
    """One scale per matrix: q, k and v share the largest of theirs, and so do gate and up."""
    folder, matrices, scales = write_static(plain, tmp_path / "q", kind)
    assert share_of_equal_rows(folder, rounded_to_the_largest(folder, matrices), scales) > 0.6


def test_mixed_up_scales_are_noticed(plain: Path, tmp_path: Path) -> None:
    folder, matrices, scales = write_static(plain, tmp_path / "q", "modelopt")
    rounded, prefix = rounded_to_the_largest(folder, matrices), "model.layers.1.self_attn"
    factor = stored_scale(folder, f"{prefix}.q_proj") / stored_scale(folder, f"{prefix}.k_proj")
    wrong = rounded | {f"{prefix}.k_proj": rounded[f"{prefix}.k_proj"] * factor}
    assert share_of_equal_rows(folder, wrong, scales) < 0.1
    swapped = scales | {f"{prefix}.o_proj": scales["model.layers.1.mlp.down_proj"]}
    assert share_of_equal_rows(folder, rounded, swapped) < 0.1


@pytest.mark.parametrize("kind", ["compressed-tensors-channel", "modelopt-channel"])
def test_scales_per_output_are_kept(plain: Path, tmp_path: Path, kind: str) -> None:
    folder, matrices, scales = write_static(plain, tmp_path / "q", kind)
    assert share_of_equal_rows(folder, matrices, scales) > 0.6
    turned = matrices | {name: matrices[name].T for name in NAMES if name.endswith("o_proj")}
    assert share_of_equal_rows(folder, turned, scales) < 0.1


def test_blocks_are_rounded_again_and_activations_calibrated(plain: Path, tmp_path: Path) -> None:
    folder, exact = write_fp8(plain, tmp_path / "q", "qwen")
    matrices = rounded_once({name: exact[f"{name}.weight"] for name in NAMES})
    assert share_of_equal_rows(folder, matrices, None) > 0.6


def test_matrices_with_one_scale_in_common_keep_their_numbers(plain: Path, tmp_path: Path) -> None:
    """ModelOpt exports q, k and v with a common scale: nothing is rounded a second time."""
    _, exact = write_fp8(plain, tmp_path / "first", "modelopt")
    more: dict[str, torch.Tensor] = {}
    for name in NAMES:
        bits = (torch.from_numpy(exact[f"{name}.weight"]) / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn)
        more |= {f"{name}.weight": bits, f"{name}.weight_scale": torch.tensor(0.01)}
    folder, _ = write_fp8(plain, tmp_path / "q", "modelopt", more)
    with ExitStack() as stack:
        (source,) = open_sources(folder, None, 2, (), stack)
        layers = CheckpointLayers(source.weights, dict.fromkeys(NAMES, 0.25))
        names = tuple(f"model.layers.2.{part}" for part in FUSED[0])
        matrix, scale = layers.matrix(names, 64, (64, 32, 32))
        assert scale == 0.25
        assert matrix.scales == np.float32(0.01)
        stored = [more[f"{name.replace('.2.', '.1.')}.weight"].view(torch.uint8).numpy() for name in names]
        np.testing.assert_array_equal(matrix.bits, np.concatenate(stored))
        added, _ = layers.matrix(("model.layers.1.mlp.down_proj",), 160, (64,))  # a copy whose outputs are zero
        assert not added.bits.any()


def test_notes(plain: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    folder, *_ = write_static(plain, tmp_path / "q", "modelopt")
    for directory in (plain, folder):
        options = BuildOptions(directory, None, tmp_path / "e", "tensorrt_rtx", quantization="FP8", dry_run=True)
        build_engines(options, note=notes.append)
    assert notes == [
        "target: F32 matrices of the layers become e4m3, which keeps 4 significant bits; scales of activations are "
        "calibrated",
        "target: e4m3 matrices are kept, except those with different scales that are multiplied as one; scales of "
        "activations are the checkpoint's",
    ]


@pytest.mark.parametrize(
    ("tensor", "value", "message"),
    [
        ("input_scale", [0.0], r"q_proj\.input_scale is \[0\.0\]; it must be one positive number"),
        ("input_scale", [1.0, 2.0], r"input_scale is \[1\.0, 2\.0\]; it must be one"),
        ("weight_scale", [float("nan")], r"q_proj\.weight_scale cannot be used: a scale is not positive"),
    ],
)
def test_scales_that_cannot_be_are_named(
    plain: Path, tmp_path: Path, tensor: str, value: list[float], message: str
) -> None:
    folder, _ = write_fp8(plain, tmp_path / "q", "modelopt", {f"{NAMES[0]}.{tensor}": torch.tensor(value)})
    options = BuildOptions(folder, None, tmp_path / "e", "tensorrt_rtx", quantization="FP8", dry_run=True)
    with pytest.raises(CheckpointError, match=message):
        build_engines(options)
