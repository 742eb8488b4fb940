"""fp8 in the cuda engine, on the host: what e4m3 loses, that rows do not see each other, memory, refusals.

torch's own product runs on the CPU too; that it does on a GPU has not been tried.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu.reference_ops import ReferenceOps
from faser_trtllm.builder.cuda_engine_file import CudaFile, num_bytes, tensor_shapes
from faser_trtllm.config import ExecutorConfig, Quantization, parse
from faser_trtllm.engine.cuda.memory import weight_bytes
from faser_trtllm.engine.cuda.weights import MATRICES, DeviceWeights
from faser_trtllm.engine.gpu import fp8 as cuda_fp8
from faser_trtllm.engine.gpu.fp8 import check_capability, check_matrix, check_product, scaled_linear
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows, quantize_rows
from lab.reference.cuda.products.scaled_linear import scaled_linear_reference
from tests.engine.cuda.harness import build_pair, open_engine, random_tokens
from tests.engine.cuda.host_executor import HostGpu, generate, mixed_requests
from tests.ops.cuda.emulation import emulated
from tests.support.checkpoints import make_pair
from tests.support.effort import examples, pick
from tests.support.engine_harness import Harness

FP8 = Quantization.FP8
# Erratic is in every mode by turns.
POLICIES = ["fixed:4", "erratic", *pick([], ["fixed:3:draft_ahead", "fixed:3:ping_pong"])]
HALF_STEP = 2.0**-4  # of a number with three bits behind its first one
SMALLEST = 2.0**-10 / 224  # of a row's largest number: half of e4m3's smallest one, which is 2^-9


class TorchOps(ReferenceOps):
    """Products as on a GPU, by torch itself; the kernels' references for the rest."""

    def scaled_linear(self, x, weight, bias):
        return scaled_linear(x, weight, bias)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    return build_pair(tmp_path_factory.mktemp("pair"), exit_layers=(1, 2))


def random_rows(num_rows: int, width: int, seed: int) -> torch.Tensor:
    """bf16 rows whose sizes are as far apart as 2^-30 and 2^30."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-30, 31, (num_rows, 1), generator=generator)
    return (torch.randn(num_rows, width, generator=generator) * 2.0**sizes).bfloat16()


@given(st.integers(1, 9), st.sampled_from([16, 48, 256]), st.integers(0, 10**6))
@settings(max_examples=examples(60))
def test_a_number_comes_back_within_half_a_step(num_rows: int, width: int, seed: int) -> None:
    x = random_rows(num_rows, width, seed)
    found = quantize_rows(x)
    largest = x.float().abs().amax(-1, keepdim=True)
    error = (found.dequantized() - x.float()).abs()
    assert (error <= torch.maximum(HALF_STEP * x.float().abs(), SMALLEST * largest)).all()
    values = found.values.float().abs().amax(-1)
    assert (values > 448 / 2 * (1 - HALF_STEP)).all(), "e4m3's range is used up to its last binade"
    assert torch.equal(torch.frexp(found.scales).mantissa, torch.full_like(found.scales, 0.5)), "powers of two"


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(448.0, 1.0), (450.0, 2.0), (224.0, 0.5), (226.0, 1.0), (1.75, 2.0**-8), (1.7578125, 2.0**-7), (0.0, 2.0**-63)],
)
def test_the_scale_is_the_smallest_that_holds_the_largest_number(largest: float, scale: float) -> None:
    found = quantize_rows(torch.tensor([[0.0] * 15 + [-largest]]).bfloat16())
    assert found.scales.item() == scale
    assert found.dequantized()[0, -1].item() == pytest.approx(-largest, rel=HALF_STEP)


def test_nan_stays_nan() -> None:
    x = torch.ones(2, 16).bfloat16()
    x[1, 3] = float("nan")
    y = scaled_linear(x, quantize_rows(torch.ones(16, 16).bfloat16()), None)
    assert (y[0] == 16).all()
    assert y[1].isnan().all()


@given(st.integers(1, 9), st.sampled_from([16, 80, 256]), st.integers(0, 10**6), st.booleans())
@settings(max_examples=examples(40))
def test_torchs_product_is_the_references(num_rows: int, width: int, seed: int, has_bias: bool) -> None:
    x, weight = random_rows(num_rows, width, seed), quantize_rows(random_rows(48, width, seed + 1))
    bias = random_rows(1, 48, seed + 2)[0] if has_bias else None
    found = scaled_linear(x, weight, bias).float()
    wanted = scaled_linear_reference(x, weight, bias).float()
    # A sum of float32 numbers in another order, rounded to bf16, and again with the bias.
    terms = quantize_rows(x).dequantized().abs() @ weight.dequantized().abs().t()
    size = wanted.abs() if bias is None else wanted.abs() + bias.float().abs()
    assert ((found - wanted).abs() <= 2.0**-7 * size + width * 2.0**-23 * terms).all()


@given(st.integers(2, 12), st.data())
@settings(max_examples=examples(40))
def test_a_row_does_not_see_the_others(num_rows: int, data: st.DataObject) -> None:
    """Bit for bit, whatever runs beside it: the reference, whose sums are exact, and what rows become on the way."""
    seed = data.draw(st.integers(0, 10**6))
    x, weight = random_rows(num_rows, 64, seed), quantize_rows(random_rows(32, 64, seed + 1))
    rows = sorted(data.draw(st.sets(st.integers(0, num_rows - 1), min_size=1)))
    part, whole = quantize_rows(x[rows]), quantize_rows(x)
    assert torch.equal(part.values.view(torch.uint8), whole.values[rows].view(torch.uint8))
    assert torch.equal(part.scales, whole.scales[rows])
    for dtype in (torch.bfloat16, torch.float32):
        y = scaled_linear_reference(x.to(dtype), weight, None)
        assert torch.equal(scaled_linear_reference(x[rows].to(dtype), weight, None), y[rows])


def test_the_references_sums_are_exact() -> None:
    """So is the claim above: numbers of both ends of e4m3's range, in any order, give one sum."""
    ends = torch.tensor([448.0, 2.0**-9, -448.0, -(2.0**-9), 2.0**-9, 1.0]).repeat(700)[:4096].bfloat16()
    x = torch.stack([ends, ends.flip(0), ends[torch.randperm(4096, generator=torch.Generator().manual_seed(0))]])
    weight = ScaledRows(torch.full((16, 4096), 448.0).to(torch.float8_e4m3fn), torch.ones(16, 1))
    y = scaled_linear_reference(x.double().float(), weight, None)
    assert (y == float(ends.double().sum() * 448)).all()


def test_a_whole_model_stays_near_its_bf16_engine(pair) -> None:
    """Products are torch's. 3 bits of significand on both sides make 3.7 % of noise, independent for each product."""
    tokens = random_tokens(60)
    with open_engine(pair.target_path, ReferenceOps(), torch.bfloat16) as engine:
        wanted = Harness(engine).run([(1, tokens, 0, 60)])[0]
    with open_engine(pair.target_path, TorchOps(), torch.bfloat16, quantization=FP8) as engine:
        found = Harness(engine).run([(1, tokens, 0, 60)])[0]
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    noise = 0.037 * (4 * engine.spec.num_layers) ** 0.5
    assert 0.5 * noise < error < 1.5 * noise
    with open_engine(pair.target_path, ReferenceOps(), torch.bfloat16, quantization=FP8) as engine:
        reference = Harness(engine).run([(1, tokens, 0, 60)])[0]
    assert np.linalg.norm(found - reference) < 0.4 * np.linalg.norm(found - wanted), "and nearer to the reference's"


class ScalingOps(TorchOps):
    """Rows are quantized by the very kernels, emulated: alone, with the residual, and with the activation."""

    def __init__(self) -> None:
        super().__init__()
        stems = ("quantize_rows", "gated_silu")
        self.kernels = Ops({stem: emulated(stem) for stem in stems}, lambda: 0, num_sms=4)
        self.num_rows_in_e4m3 = 0

    def scaled_linear(self, x, weight, bias):
        self.num_rows_in_e4m3 += isinstance(x, ScaledRows)
        return self.kernels.scaled_linear(x, weight, bias)

    def gated_silu(self, gate_up, hidden, bias, eps):
        return self.kernels.gated_silu(gate_up, hidden, bias, eps)

    def add_scaled(self, hidden, product):
        return self.kernels.add_scaled(hidden, product)

    def scaled_silu(self, gate_up, hidden, bias, eps):
        return self.kernels.scaled_silu(gate_up, hidden, bias, eps)


class UnfusedOps(ScalingOps):
    """The same in kernels of their own; rows by torch, whose activation is another one in the last bit."""

    def scaled_linear(self, x, weight, bias):
        return scaled_linear(x, weight, bias)

    def add_scaled(self, hidden, product):
        hidden += product

    def scaled_silu(self, gate_up, hidden, bias, eps):
        return self.gated_silu(gate_up, hidden, bias, eps)


def test_rows_that_come_in_e4m3_are_those_that_are_quantized_later(pair) -> None:
    """The emulated fused kernels match torch's arithmetic with a launch per operation, bit for bit."""
    rows = [(0, random_tokens(9), 0, 9)]
    found = []
    for ops in (UnfusedOps(), ScalingOps()):
        with open_engine(pair.target_path, ops, torch.bfloat16, quantization=FP8) as engine:
            found.append(Harness(engine).run(rows)[0])
            num_layers = engine.spec.num_layers
    np.testing.assert_array_equal(found[0], found[1])
    # Each layer's inner rows and hidden rows, and those that it leaves to the next, but for the last.
    assert ops.num_rows_in_e4m3 == 3 * num_layers - 1


def test_a_pass_does_not_depend_on_what_runs_beside_it(pair) -> None:
    tokens, other = random_tokens(40), random_tokens(40, 1)
    with open_engine(pair.target_path, quantization=FP8) as engine:
        wanted = Harness(engine).run([(0, tokens, 0, 40)])[0]
    with open_engine(pair.target_path, quantization=FP8) as engine:
        harness = Harness(engine)
        found = []
        for begin, end in ((0, 7), (7, 8), (8, 31), (31, 40)):
            found.append(harness.run([(4, other, begin, end), (0, tokens, begin, end)])[1])
    np.testing.assert_array_equal(np.concatenate(found), wanted)


def test_segments_are_the_whole_pass(pair) -> None:
    rows = [(0, random_tokens(12), 0, 12)]
    with open_engine(pair.target_path, quantization=FP8) as engine:
        whole = np.concatenate(Harness(engine).run(rows))
        batch = Harness(engine).batch(rows)
        parts = [engine.run_segment(batch, segment) for segment in range(3)]
        np.testing.assert_array_equal(parts[-1][:], whole)


@pytest.mark.parametrize("policy", POLICIES)
def test_speculation_changes_no_token(engines, policy: str) -> None:
    requests = mixed_requests(has_edits=False)
    alone, _ = generate(engines, "off", requests, max_batch_size=1, max_num_tokens=128, quantization=FP8)
    plain, _ = generate(engines, "off", requests, max_batch_size=1, max_num_tokens=128)
    tokens, found = generate(engines, policy, requests, quantization=FP8)
    assert tokens == alone
    assert found["num_accepted_tokens"] > 0
    assert alone != plain, "the engine that was tested is another one than in bf16"


def test_the_layers_matrices_take_half_the_memory(pair) -> None:
    with CudaFile.open(pair.target_path) as file:
        sizes, cpu = file.model, torch.device("cpu")
        plain, scaled = DeviceWeights.load(file, cpu), DeviceWeights.load(file, cpu, quantization=FP8)
    shapes = tensor_shapes(sizes)
    matrices = [shape for name, shape in shapes.items() if name.rpartition(".")[2] in MATRICES]
    assert len(matrices) == 4 * sizes["num_layers"]
    numbers, scales = sum(out * width for out, width in matrices), sum(out for out, _ in matrices)
    assert plain.num_bytes - scaled.num_bytes == numbers - 4 * scales
    # What is counted before loading is what is then held, but for the two tables of rotations.
    rotations = 2 * 4 * sizes["max_seq_len"] * sizes["head_dim"] // 2 - 4 * sizes["head_dim"] // 2
    assert weight_bytes(pair.target_path, FP8) == scaled.num_bytes - rotations
    folded = 2 * 2 * sizes["num_layers"] * sizes["hidden_size"]  # two norms of a layer are in the matrices behind them
    assert weight_bytes(pair.target_path, Quantization.NONE) == num_bytes(sizes, "bfloat16") - folded
    for name in ("embedding", "lm_head", "final_norm"):
        assert torch.equal(getattr(plain, name), getattr(scaled, name))
    for layer in scaled.layers:
        assert all(isinstance(getattr(layer, name), ScaledRows) for name in MATRICES)


def refusal(call) -> str:
    with pytest.raises(ConfigError) as error:
        call()
    return str(error.value)


def test_a_gpu_without_fp8_is_refused() -> None:
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        check_capability(capability, "NVIDIA H200")
    assert refusal(lambda: check_capability((8, 0), "NVIDIA A100-SXM4-80GB")) == (
        "quantization is fp8, NVIDIA A100-SXM4-80GB has compute capability 8.0, and fp8 products begin at 8.9; "
        "set quantization to none"
    )


def test_a_torch_without_the_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_product(torch.device("cpu"))

    def missing(*arguments, **options):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling\nmore lines")

    monkeypatch.setattr(torch, "_scaled_mm", missing)
    message = refusal(lambda: check_product(torch.device("cpu")))
    assert "has no product of e4m3 rows here (CUBLAS_STATUS_NOT_SUPPORTED when calling); install another" in message
    monkeypatch.setattr(cuda_fp8, "scaled_linear", lambda x, weight, bias: x + 1)
    assert "multiplies e4m3 rows wrongly here" in refusal(lambda: check_product(torch.device("cpu")))


def test_engines_that_cannot_be_quantized_are_refused(tmp_path, pair) -> None:
    check_matrix("layers.0.qkv", (48, 64), "bfloat16")
    assert "layers.0.down is 64 x 72, and both sizes must be multiples of 16; set" in refusal(
        lambda: check_matrix("layers.0.down", (64, 72), "bfloat16")
    )
    half = build_pair(tmp_path, dtype="float16")
    assert "needs engines of bfloat16, these are float16; rebuild them with --dtype bfloat16" in refusal(
        lambda: open_engine(half.target_path, quantization=FP8)
    )


def test_backends_without_fp8_refuse_it(tmp_path) -> None:
    from faser_trtllm.builder.build import BuildOptions, build_engines

    target, draft = make_pair(tmp_path / "checkpoints", num_layers=1)
    build_engines(BuildOptions(target, draft, tmp_path / "engines"))
    message = refusal(lambda: open_executor(tmp_path / "engines", parse(ExecutorConfig, {"quantization": "fp8"})))
    assert "quantization is fp8, " in message
    assert "holds cpu engines, which run as they were built; set it to none or build with --backend cuda" in message
    assert "configuration key quantization is 'int8': input should be 'none' or 'fp8'" in refusal(
        lambda: parse(ExecutorConfig, {"quantization": "int8"})
    )


def test_a_pair_that_does_not_fit_is_refused_before_it_is_loaded(engines) -> None:
    class SmallGpu(HostGpu):
        num_free_bytes = 200_000

        def make_ops(self, runtime, head_dim, deterministic=False, has_mxfp4=False):
            raise AssertionError("weights were loaded")

    message = refusal(lambda: generate(engines, "fixed:4", mixed_requests(False), SmallGpu()))
    assert message.startswith(
        "the engines need 0.00 GiB of GPU memory (weights of the target 0.00, weights of the draft"
    )
    assert "set quantization to fp8, build with a larger --tp_size (cuda) or take a larger GPU" in message
