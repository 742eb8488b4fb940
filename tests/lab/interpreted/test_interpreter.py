"""The networks' meaning: interpreted on the CPU and compared with the torch reference, four families, ragged steps.

Nothing here runs a TensorRT kernel. Tolerances: in fp32 both sides differ by rounding only, logits have a standard
deviation near 2. In bf16 and fp16 activations and KV are rounded at every layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.builder.network.layers import UnknownLayerError
from faser_trtllm.builder.network.segment import create_network
from faser_trtllm.models.reference import ReferenceModel
from lab.interpreted import engine as interpreted
from lab.interpreted.engine import InterpretedEngine
from lab.interpreted.interpreter import Interpreter
from tests.support.effort import examples
from tests.support.networks import CASES, build, load_trt, make_model, new_builder, options
from tests.support.scenario import RAGGED, Rows, Scenario

trt = load_trt()
TOLERANCE = 5e-5
EXIT_LAYERS = (1, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Models by case and dtype of the checkpoint, each written once."""
    made: dict[tuple[str, str], Any] = {}

    def get(case: str, dtype: str = "float32") -> Any:
        if (case, dtype) not in made:
            made[case, dtype] = make_model(tmp_path_factory.mktemp(case), case, dtype)
        return made[case, dtype]

    return get


def open_scenario(model: Any, seed: int = 0, exit_layers=EXIT_LAYERS, **changes: Any) -> Scenario:
    engine = InterpretedEngine(trt, *model, options(**changes), exit_layers)
    return Scenario(engine, ReferenceModel(*model), seed)


@pytest.mark.parametrize("case", CASES)
def test_ragged_steps_in_fp32(model: Callable[..., Any], case: str) -> None:
    assert open_scenario(model(case)).worst_error(RAGGED) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama-biased", "qwen3"])
def test_ragged_steps_in_half_precision(model: Callable[..., Any], case: str, dtype: str) -> None:
    """8 and 11 bits of mantissa: about 1% and 0.1% of error."""
    scenario = open_scenario(model(case, dtype), dtype=dtype)
    limit = {"bfloat16": 0.02, "float16": 0.003}[dtype]
    for step in RAGGED:
        logits, expected = scenario.step(step)
        assert np.sqrt(np.square(logits - expected).mean()) < limit * expected.std()


def test_one_segment_is_several(model: Callable[..., Any]) -> None:
    """Without pruning, the cuts change nothing, to the bit."""
    steps = [[dataclasses.replace(rows, kept=(), num_accepted=None) for rows in step] for step in RAGGED]
    cut, whole = open_scenario(model("qwen3")), open_scenario(model("qwen3"), exit_layers=())
    for step in steps:
        np.testing.assert_array_equal(cut.step(step)[0], whole.step(step)[0])


def test_nothing_reads_beyond_the_lengths(model: Callable[..., Any]) -> None:
    """Caches start as NaN: a key that no request wrote must not count, not even with a weight of zero."""
    scenario = open_scenario(model("llama"))
    for caches in scenario.engine._caches:
        for cache in caches.values():
            cache.fill_(float("nan"))
    assert scenario.worst_error(RAGGED) < TOLERANCE


@st.composite
def scenarios(draw: st.DrawFn) -> list[list[Rows]]:
    """Up to 6 steps over 4 slots; no sequence outgrows max_seq_len."""
    lengths = [0] * 4
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        step = []
        for slot in draw(st.permutations(range(4)))[: draw(st.integers(1, 4))]:
            restart = draw(st.integers(0, 5)) == 0
            length = 0 if restart else lengths[slot]
            num_true = draw(st.integers(1, 9))
            num_wrong = draw(st.integers(0, 5))
            if length + num_true + num_wrong > options().max_seq_len:
                continue
            first = draw(st.integers(1, num_true + num_wrong))
            kept = (first, draw(st.integers(1, first)))
            accepted = draw(st.integers(1, min(num_true, kept[-1])))
            lengths[slot] = length + accepted
            step.append(Rows(slot, num_true, num_wrong, kept, accepted, restart))
        if step:
            steps.append(step)
    return steps


@settings(max_examples=examples(25))
@given(steps=scenarios(), case=st.sampled_from(["llama", "mistral-window", "qwen3"]), seed=st.integers(0, 9))
def test_drawn_scenarios(model: Callable[..., Any], steps: list[list[Rows]], case: str, seed: int) -> None:
    assert open_scenario(model(case), seed).worst_error(steps) < TOLERANCE


def _one_more(array: np.ndarray) -> np.ndarray:
    return array + 1


def _one_less(array: np.ndarray) -> np.ndarray:
    return np.maximum(array - 1, 0)


WRONG_INPUTS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "write index too large": ("write_idx", _one_more),
    "write index too small": ("write_idx", _one_less),
    "key too few": ("kv_lens", _one_less),
    "rows of a neighbor": ("unpad_idx", lambda index: np.roll(index, 1)),
    "queries of a neighbor": ("pad_idx", lambda index: np.roll(index, 1, axis=1)),
    "logits of a neighbor": ("logit_rows", lambda rows: np.roll(rows, 1)),
    "rows of another request": ("cu_q_lens", lambda cu: np.sort(np.where(cu == cu[-1], cu, np.maximum(cu - 1, 0)))),
}


@pytest.mark.parametrize("mistake", WRONG_INPUTS)
def test_wrong_inputs_are_caught(model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    name, change = WRONG_INPUTS[mistake]
    right = interpreted.native_inputs

    def wrong(*arguments: Any) -> Any:
        inputs = right(*arguments)
        inputs.arrays[name] = change(inputs.arrays[name]).astype(np.int32)
        return inputs

    monkeypatch.setattr(interpreted, "native_inputs", wrong)
    try:
        error = open_scenario(model("llama")).worst_error(RAGGED)
    except (ValueError, IndexError):  # the interpreter's own checks are as good
        return
    assert error > 1000 * TOLERANCE


def _invert_mask(network: Any) -> None:
    changed = 0
    for layer in _layers(network, trt.LayerType.ELEMENTWISE, trt.IElementWiseLayer):
        if layer.op == trt.ElementWiseOperation.GREATER:
            layer.op = trt.ElementWiseOperation.LESS
            changed += 1
    assert changed == 1


def _drop_scale(network: Any) -> None:
    for layer in _layers(network, trt.LayerType.ELEMENTWISE, trt.IElementWiseLayer):
        if layer.get_input(1).name == "softmax_scale_output":
            layer.op = trt.ElementWiseOperation.SUM


def _swap_rope_tables(network: Any) -> None:
    for layer in _layers(network, trt.LayerType.ROTARY_EMBEDDING, trt.IRotaryEmbeddingLayer):
        tables = [layer.get_input(i) for i in (1, 2)]
        for i, table in enumerate(reversed(tables), 1):
            layer.set_input(i, table)


def _layers(network: Any, kind: Any, cls: Any) -> Iterator[Any]:
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == kind:
            layer.__class__ = cls
            yield layer


@pytest.mark.parametrize("mutate", [_invert_mask, _drop_scale, _swap_rope_tables])
def test_wrong_networks_are_caught(
    model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, mutate: Callable[[Any], None]
) -> None:
    right = interpreted.build_segment

    def wrong(*arguments: Any) -> Any:
        segment = right(*arguments)
        mutate(segment.network)
        return segment

    monkeypatch.setattr(interpreted, "build_segment", wrong)
    assert open_scenario(model("llama")).worst_error(RAGGED) > 1000 * TOLERANCE


def test_unknown_layers_and_parameters_are_named() -> None:
    builder = new_builder(trt)

    def interpret(fill: Callable[[Any, Any], Any]) -> Interpreter:
        network = create_network(trt, builder)
        layer = fill(network, network.add_input("x", trt.float32, (-1, 4)))
        layer.name = "odd"
        network.mark_output(layer.get_output(0))
        return Interpreter(trt, network)

    with pytest.raises(UnknownLayerError, match=r"odd .*SOFTMAX"):
        interpret(lambda network, x: network.add_softmax(x))
    with pytest.raises(UnknownLayerError, match=r"odd \(UNARY\): op ABS"):
        interpret(lambda network, x: network.add_unary(x, trt.UnaryOperation.ABS))
    with pytest.raises(UnknownLayerError, match=r"odd \(ACTIVATION\): type RELU"):
        interpret(lambda network, x: network.add_activation(x, trt.ActivationType.RELU))
    with pytest.raises(UnknownLayerError, match=r"odd \(REDUCE\): op MAX"):
        interpret(lambda network, x: network.add_reduce(x, trt.ReduceOperation.MAX, 2, True))


def test_inputs_are_checked(model: Callable[..., Any]) -> None:
    segment = build(trt, new_builder(trt), model("llama"), None)
    interpreter = Interpreter(trt, segment.network, segment.weights)
    feeds = {
        "hidden_in": torch.zeros(3, 64),
        "exit_rows": torch.zeros(2, dtype=torch.int32),
        "candidates": torch.zeros(2, 8, dtype=torch.int32),
    }
    assert interpreter.run(feeds)["scores"].shape == (2, 8)
    for name, tensor in (
        ("hidden_in", torch.zeros(3, 63)),
        ("hidden_in", torch.zeros(3, 64, dtype=torch.bfloat16)),
        ("exit_rows", torch.zeros(2, 1, dtype=torch.int32)),
    ):
        with pytest.raises(ValueError, match=f"{name} .*declared is"):
            interpreter.run(feeds | {name: tensor})
    with pytest.raises(ValueError, match="'candidates'] missing"):
        interpreter.run({name: feeds[name] for name in ("hidden_in", "exit_rows")})
    half = build(trt, new_builder(trt), model("llama", "bfloat16"), None, dtype="bfloat16")
    with pytest.raises(ValueError, match="weights must have"):
        Interpreter(trt, half.network)
