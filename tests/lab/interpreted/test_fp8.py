"""Networks in fp8, interpreted on the CPU: TensorRT's rules, the torch reference, and rows that are independent.

No kernel of TensorRT runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from faser_trtllm.builder.network.fp8 import CheckpointLayers
from faser_trtllm.builder.network.layers import UnknownLayerError
from faser_trtllm.builder.network.segment import create_network
from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.models.calibration import calibrate_input_scales
from faser_trtllm.models.weights import expected_shapes
from lab.interpreted.engine import InterpretedEngine
from lab.interpreted.interpreter import Interpreter
from tests.support.fp8_reference import Fp8Reference, rounded_once
from tests.support.networks import load_trt, make_model, new_builder, options
from tests.support.scenario import RAGGED, Scenario

trt = load_trt()
TOKEN_IDS = np.random.default_rng(7).integers(0, 320, 64).tolist()
# Logits have a standard deviation near 2. Both sides round the same numbers, so most rows differ by fp32's last bits
# only. But where two sums fall on different sides of a tie, an input moves by a step of e4m3 (1/16 to 1/8 of it), which
# this row and those that attend to it show.
SAME = 1e-4
ONE_STEP = 0.6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def get(case: str) -> Any:
        if case not in made:
            config, weights = make_model(tmp_path_factory.mktemp(case), case)
            made[case] = config, weights, calibrate_input_scales(config, weights, TOKEN_IDS)
        return made[case]

    return get


def open_engine(model: Any, exit_layers: Sequence[int] = (1, 3), **changes: Any) -> InterpretedEngine:
    config, weights, scales = model
    fp8 = CheckpointLayers(weights, scales)
    return InterpretedEngine(trt, config, weights, options(**changes), exit_layers, fp8)


def open_reference(model: Any) -> Fp8Reference:
    config, weights, scales = model
    shapes = expected_shapes(config)
    matrices = {name: weights.float32(f"{name}.weight", shapes[f"{name}.weight"]) for name in scales}
    return Fp8Reference(config, weights, rounded_once(matrices), scales)


def errors(engine: InterpretedEngine, reference: Fp8Reference) -> np.ndarray:
    """The largest error of each row's logits, over ragged steps with pruned rows."""
    scenario = Scenario(engine, reference)
    pairs = [scenario.step(step) for step in RAGGED]
    return np.concatenate([np.abs(logits - expected).max(1) for logits, expected in pairs])


@pytest.mark.parametrize("case", ["llama-biased", "mistral-window", "qwen2", "qwen3"])
def test_ragged_pruned_steps_are_the_references(model: Callable[[str], Any], case: str) -> None:
    found = errors(open_engine(model(case)), open_reference(model(case)))
    assert found.max() < ONE_STEP
    assert (found < SAME).mean() > 0.6


@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_a_wrong_scale_is_noticed(model: Callable[[str], Any], part: str) -> None:
    config, weights, scales = model("qwen3")
    wrong = scales | {f"model.layers.1.{part}": 1.5 * scales[f"model.layers.1.{part}"]}
    found = errors(open_engine((config, weights, wrong)), open_reference(model("qwen3")))
    assert (found < SAME).mean() < 0.1


def test_fp8_is_not_what_fp32_says(model: Callable[[str], Any]) -> None:
    """Or the tests above would compare nothing."""
    config, weights, _ = model("qwen3")
    plain = InterpretedEngine(trt, config, weights, options(), (1, 3))
    assert (errors(plain, open_reference(model("qwen3"))) < SAME).mean() < 0.1


Pass = Sequence[tuple[int, int, int]]


def rows_of(engine: InterpretedEngine, passes: Sequence[Pass]) -> dict[tuple[int, int], bytes]:
    """The bits of every row's logits by slot and position; passes are of (slot, first, end)."""
    table = np.array([[2], [1], [0], [3]], np.int32)
    found = {}
    for rows in passes:
        builder = BatchBuilder(table)
        for slot, first, end in rows:
            tokens = np.random.default_rng(slot).integers(0, 320, 64).astype(np.int32)
            builder.add(slot, tokens, first, end, end - first)
        logits = engine.forward(builder.build())
        places = [(slot, position) for slot, first, end in rows for position in range(first, end)]
        found |= {place: row.tobytes() for place, row in zip(places, logits, strict=True)}
    return found


@pytest.mark.usefixtures("exact_sums")
@pytest.mark.parametrize("case", ["llama-biased", "qwen3"])
def test_a_row_has_the_same_bits_in_any_batch(model: Callable[[str], Any], case: str) -> None:
    """Scales are static: in one pass with others, in passes of its own, alone."""
    lengths = [(0, 12), (1, 9), (2, 20), (3, 5)]
    together: list[Pass] = [[(slot, 0, length) for slot, length in lengths]]
    apart: list[Pass] = [[(slot, 0, length)] for slot, length in lengths]
    alone: list[Pass] = [[(slot, i, i + 1)] for slot, length in lengths for i in range(length)]
    mixed: list[Pass] = [[(0, 0, 5), (2, 0, 1)], [(2, 1, 20), (0, 5, 12), (1, 0, 9)], [(3, 0, 3)], [(3, 3, 5)]]
    expected = rows_of(open_engine(model(case), dtype="bfloat16"), together)
    for passes in (apart, alone, mixed):
        assert rows_of(open_engine(model(case), dtype="bfloat16"), passes) == expected


class Linear:
    """One product in fp8: x [rows, num_in] of a dtype through weight e4m3 [num_out, num_in]."""

    def __init__(self, bits: np.ndarray, **changes: Any) -> None:
        """changes: scale, scale_dtype, weight_scales, axis, dtype (of x and what is dequantized)."""
        given = {"scale": np.float32(0.5), "weight_scales": np.array(0.25, np.float32), "axis": None} | changes
        dtype = given.get("dtype", trt.float32)
        self._builder = new_builder(trt)
        network = create_network(trt, self._builder)
        self._kept: dict[str, np.ndarray] = {}
        x = network.add_input("x", dtype, (-1, bits.shape[1]))
        scale = self._constant(network, "scale", given["scale"], given.get("scale_dtype", trt.float32))
        quantized = network.add_quantize(x, scale, trt.fp8).get_output(0)
        left = network.add_dequantize(quantized, scale, dtype).get_output(0)
        weight = self._constant(network, "weight", bits, trt.fp8)
        scales = self._constant(network, "weight_scales", given["weight_scales"], trt.float32)
        dequantize = network.add_dequantize(weight, scales, dtype)
        if given["axis"] is not None:
            dequantize.axis = given["axis"]
        kinds = trt.MatrixOperation
        y = network.add_matrix_multiply(left, kinds.NONE, dequantize.get_output(0), kinds.TRANSPOSE).get_output(0)
        for name, tensor in (("y", y), ("rounded", left)):
            tensor.name = name
            network.mark_output(tensor)
        self._interpreter = Interpreter(trt, network, self._kept)

    def run(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._interpreter.run({"x": x})

    def _constant(self, network: Any, name: str, values: Any, dtype: Any) -> Any:
        shape = np.shape(values)
        self._kept[name] = array = np.ascontiguousarray(values)
        layer = network.add_constant(shape, trt.Weights(dtype, array.ctypes.data, array.size))
        layer.name = name
        return layer.get_output(0)


BITS = torch.randn(48, 32, generator=torch.Generator().manual_seed(0)).mul(40).to(torch.float8_e4m3fn)


def bits() -> np.ndarray:
    return BITS.view(torch.uint8).numpy()


def test_numbers_saturate_and_ties_go_to_even() -> None:
    """In steps of the scale 0.5: 17 lies between 16 and 18, 19 between 18 and 20."""
    x = torch.tensor([0.0, 224.0, 230.0, 1e9, -1e9, 8.5, 9.5, -8.5, 2.0**-11, 2.0**-10 * 1.5])
    expected = torch.tensor([0.0, 224.0, 224.0, 224.0, -224.0, 8.0, 10.0, -8.0, 0.0, 2.0**-9])
    rows = torch.zeros(1, 32)
    rows[0, : len(x)] = x
    assert Linear(bits()).run(rows)["rounded"][0, : len(x)].tolist() == expected.tolist()


@pytest.mark.parametrize("per_output", [False, True])
def test_a_product_is_scaled_once(per_output: bool) -> None:
    scales = np.random.default_rng(0).random(48).astype(np.float32) if per_output else np.array(0.25, np.float32)
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(1)) * 30
    y = Linear(bits(), weight_scales=scales, axis=0 if per_output else None).run(x)["y"]
    numbers = (x / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    exact = (numbers @ BITS.double().T) * 0.5 * torch.from_numpy(scales).double()
    assert torch.equal(y, exact.float())


def test_a_products_row_is_its_own() -> None:
    linear = Linear(bits())
    x = torch.randn(33, 32, generator=torch.Generator().manual_seed(2)) * 30
    y = linear.run(x)["y"]
    for i in range(len(x)):
        assert torch.equal(linear.run(x[i : i + 1])["y"][0], y[i])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scale": np.ones(32, np.float32)}, ValueError, r"activations have one scale, not \[32\]"),
        ({"scale": np.float32(-0.5)}, ValueError, "scales must be positive"),
        ({"weight_scales": np.ones((48, 1), np.float32)}, UnknownLayerError, r"a scale of shape \[48, 1\]"),
    ],
)
def test_scales_that_a_network_cannot_have(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Linear(bits(), **changes)


@pytest.mark.parametrize(("num_scales", "axis"), [(32, 0), (48, 1), (48, None), (47, 0)])
def test_scales_of_another_axis_are_refused_by_tensorrt_itself(num_scales: int, axis: int | None) -> None:
    with pytest.raises(RuntimeError, match="Could not get tensor shape"):
        Linear(bits(), weight_scales=np.ones(num_scales, np.float32), axis=axis)


def test_a_half_precision_scale_goes_with_its_own_type() -> None:
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"a scale of torch\.float16 does not go with torch\.bfloat16"):
        Linear(bits(), scale=np.float16(0.5), scale_dtype=trt.float16, dtype=trt.bfloat16).run(x)
    assert Linear(bits(), scale=np.float32(0.5), dtype=trt.bfloat16).run(x)["y"].dtype is torch.bfloat16
