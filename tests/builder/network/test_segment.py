"""Real ahead-of-time builds with TensorRT for RTX, on the CPU; no engine is ever run here."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser_trtllm.builder.network.options import NetworkOptions
from faser_trtllm.builder.network.segment import (
    build_segment,
    create_network,
    load_tensorrt,
    logger,
)
from faser_trtllm.builder.source import segment_bounds
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from faser_trtllm.models.weights import CheckpointWeights, expected_shapes
from tests.support.checkpoints import write_safetensors
from tests.support.effort import pick
from tests.support.networks import build, load_trt, make_model, new_builder, options

trt = load_trt()
PARTS = ((0, 1), (1, 3), (3, 4), None)
CASES, DTYPES = ("llama-biased", "mistral-window", "qwen2", "qwen3"), ("bfloat16", "float16")
EACH_ONCE = tuple(zip(CASES, 2 * DTYPES, strict=True))


def build_engine(builder: Any, segment: Any) -> Any:
    config = builder.create_builder_config()
    config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    for profile in segment.profiles(builder):
        assert config.add_optimization_profile(profile) >= 0
    return builder.build_serialized_network(segment.network, config)


@pytest.mark.parametrize(("case", "dtype"), pick(EACH_ONCE, product(CASES, DTYPES)))
def test_segments_build(tmp_path: Path, case: str, dtype: str) -> None:
    model, builder = make_model(tmp_path, case, dtype), new_builder(trt)
    logger(trt).errors.clear()
    for part in PARTS:
        segment = build(trt, builder, model, part, dtype=dtype)
        engine = build_engine(builder, segment)
        assert engine is not None, logger(trt).errors
        num_bytes = sum(array.nbytes for array in segment.weights.values())
        assert engine.nbytes > num_bytes, "the weights are in the engine"
    assert not logger(trt).errors


def test_fp32_and_several_profiles_build(tmp_path: Path) -> None:
    model, builder = make_model(tmp_path, "llama-head-80-yarn"), new_builder(trt)
    segment = build(trt, builder, model, (0, 4), profile_rows=(8, 32))
    assert len(segment.profiles(builder)) == 3
    assert build_engine(builder, segment) is not None
    limits = segment.profiles(builder)[0].get_shape("token_ids")
    assert [tuple(shape) for shape in limits] == [(1,), (8,), (8,)]


def test_inputs_and_outputs(tmp_path: Path) -> None:
    model, builder = make_model(tmp_path, "llama", "bfloat16"), new_builder(trt)
    expected = {
        (0, 1): (("token_ids", ("rows",)), ("hidden_out", ("rows", 64))),
        (3, 4): (("hidden_in", ("rows", 64)), ("logits", ("logit_rows", 320))),
    }
    for part, (first, last) in expected.items():
        segment = build(trt, builder, model, part, dtype="bfloat16")
        assert (segment.inputs[0].name, segment.inputs[0].shape) == first
        assert (segment.outputs[-1].name, segment.outputs[-1].shape) == last
        network = segment.network
        for specs, count, tensor in (
            (segment.inputs, network.num_inputs, network.get_input),
            (segment.outputs, network.num_outputs, network.get_output),
        ):
            declared = [(tensor(i).name, tuple(tensor(i).shape)) for i in range(count)]
            assert sorted(declared) == sorted((spec.name, spec.trt_shape) for spec in specs)
        cache = next(spec for spec in segment.inputs if spec.name == f"k_cache_{part[0]}")
        assert (cache.dtype, cache.shape) == ("bfloat16", ("batch", 2, 96, 16))
        assert ("logit_rows" in {spec.name for spec in segment.inputs}) == (part == (3, 4))


def test_weights_are_not_copied(tmp_path: Path) -> None:
    """A bf16 matrix that stays whole is the checkpoint's own memory, and so the network's."""
    config, weights = make_model(tmp_path, "llama", "bfloat16")
    segment = build(trt, new_builder(trt), (config, weights), (0, 4), dtype="bfloat16")
    for name in ("model.embed_tokens", "model.layers.2.self_attn.o_proj", "model.layers.0.mlp.down_proj", "lm_head"):
        shape = expected_shapes(config)[f"{name}.weight"]
        assert np.shares_memory(segment.weights[f"{name}.weight"], weights.bfloat16(f"{name}.weight", shape))


def test_specification(tmp_path: Path) -> None:
    """The same in another process; another for another network; values of the checkpoint do not matter."""
    model, builder = make_model(tmp_path / "a", "llama"), new_builder(trt)
    mine = build(trt, builder, model, (0, 2)).specification
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.support.networks import *\n"
        "from tests.support.networks import load_model_config\n"
        "trt = load_trt(); path = Path(sys.argv[1])\n"
        "model = (load_model_config(path), CheckpointWeights(path))\n"
        "print(build(trt, new_builder(trt), model, (0, 2)).specification)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a")], capture_output=True, text=True)
    assert done.stdout.strip() == mine, done.stderr
    others = {
        build(trt, builder, model, (1, 3)).specification,
        build(trt, builder, model, (0, 2), max_seq_len=80, tokens_per_block=80).specification,
        build(trt, builder, model, (0, 2), max_num_tokens=65).specification,
        build(trt, builder, make_model(tmp_path / "b", "llama-biased"), (0, 2)).specification,
        build(trt, builder, make_model(tmp_path / "c", "mistral-window"), (0, 2)).specification,
    }
    assert len(others) == 5
    assert mine not in others
    changed = tmp_path / "d"
    config, _ = make_model(changed, "llama")
    tensors = {name: np.zeros(shape, np.float32) for name, shape in expected_shapes(config).items()}
    write_safetensors(changed, tensors, "float32")
    assert build(trt, builder, (config, CheckpointWeights(changed)), (0, 2)).specification == mine


def test_float16_overflow_is_refused(tmp_path: Path) -> None:
    config, weights = make_model(tmp_path, "llama")
    tensors = {name: weights.float32(name, shape) for name, shape in expected_shapes(config).items()}
    tensors["model.layers.1.mlp.down_proj.weight"][3, 3] = -70000
    write_safetensors(tmp_path, tensors, "float32")
    with pytest.raises(ConfigError, match=r"down_proj.weight has 70000; build with --dtype bfloat16"):
        build(trt, new_builder(trt), (config, CheckpointWeights(tmp_path)), (0, 4), dtype="float16")


def test_segment_bounds() -> None:
    assert segment_bounds((), 4) == (0, 4)
    assert segment_bounds((3, 1), 4) == (0, 1, 3, 4)
    for layers in ((0,), (4,), (-1, 2)):
        with pytest.raises(InvalidArgumentError, match="between 1 and 3"):
            segment_bounds(layers, 4)
    with pytest.raises(InvalidArgumentError, match="names a layer twice"):
        segment_bounds((2, 2), 4)


def test_bad_options_are_refused(tmp_path: Path) -> None:
    for change, match in (
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_query_rows": 65}, r"max_query_rows is 65; it must be at most max_num_tokens \(64\)"),
        ({"profile_rows": (8, 8)}, r"profile_rows is \[8, 8\]"),
        ({"profile_rows": (64,)}, r"profile_rows is \[64\]"),
    ):
        with pytest.raises(ConfigError, match=match):
            options(**change)
    model, builder = make_model(tmp_path, "llama"), new_builder(trt)
    with pytest.raises(ConfigError, match="tokens_per_block is 32, TensorRT's own attention has linear caches only"):
        build(trt, builder, model, (0, 1), tokens_per_block=32)
    with pytest.raises(InvalidArgumentError, match=r"layers are \[1, 1\)"):
        build(trt, builder, model, (1, 1))
    assert isinstance(options(), NetworkOptions)


class WithoutAttention:
    """A network of a TensorRT that has neither plugins nor attention."""

    def __init__(self, network: Any) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        if name in ("add_attention_v2", "add_plugin"):
            raise AttributeError(name)
        return getattr(self._network, name)


def test_the_flavour_is_chosen_by_capability(tmp_path: Path) -> None:
    model, builder = make_model(tmp_path, "llama"), new_builder(trt)
    assert build(trt, builder, model, (0, 1)).flavour == "native"
    with pytest.raises(ConfigError, match="has neither plugins nor attention layers"):
        build_segment(trt, WithoutAttention(create_network(trt, builder)), *model, 0, 1, options())


def test_modules_that_cannot_be_imported_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=f"{name} cannot be imported .*; install it with pip install"):
            load_tensorrt(name)
    with pytest.raises(ConfigError, match="TensorRT module is 'onnx'"):
        load_tensorrt("onnx")


def test_the_logger_keeps_errors_and_drops_noise() -> None:
    log = logger(trt)
    assert log is logger(trt)
    log.errors.clear()
    log.log(trt.ILogger.ERROR, "Cuda Runtime: CUDA driver version is insufficient for CUDA runtime version")
    log.log(trt.ILogger.WARNING, "slow")
    log.log(trt.ILogger.ERROR, "a layer\n is  wrong")
    assert log.errors == ["a layer is wrong"]
