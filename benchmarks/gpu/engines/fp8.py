"""Section "fp8": the cuda engine in fp8 against bf16: GEMMs, passes, memory, tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from benchmarks.agreement import common_prefix
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines.exactness import greedy, policy_of, tokens_of
from benchmarks.gpu.engines.steps import time_step
from benchmarks.gpu.kernels.gemms import DRY_SHAPE, matrices, rows_not_as_alone
from benchmarks.gpu.machine import num_copies
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.enlarge import SHAPES, DecoderShape
from benchmarks.gpu.models.pair import open_pair
from benchmarks.gpu.models.probe import PairProbe
from benchmarks.gpu.models.prompts import bench_prompts, max_tokens, prompt_len
from benchmarks.gpu.skipped import Skipped
from benchmarks.policies.workload import Job
from faser_trtllm.builder.plan_file import arch_capability
from faser_trtllm.config import Quantization
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.gpu.fp8 import check_capability, check_product, scaled_linear
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.errors import ConfigError
from faser_trtllm.ops.cuda.driver import device_arch, device_name
from faser_trtllm.ops.cuda.quantize_rows import quantize_rows
from faser_trtllm.profiling.grid import Point
from lab.reference.cuda.products.scaled_linear import scaled_linear_reference

if TYPE_CHECKING:
    from torch import Tensor

TOKENS_FORM = "1B"
ROWS, DRY_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (1, 4)
BATCH_SIZES, DRY_BATCH_SIZES = (1, 4, 16, 64), (1, 2)
ROWS_EACH = (1, 5)
CONTEXT, DRY_CONTEXT = 448, 24
NUM_RUNS, DRY_NUM_RUNS = 15, 2
CONCURRENCY, DRY_CONCURRENCY = 16, 2
SETTINGS, DRY_SETTINGS = ("fixed:4", "fixed:8"), ("fixed:2",)
BOTH = (Quantization.NONE, Quantization.FP8)
NAMES = {Quantization.NONE: "bf16", Quantization.FP8: "fp8"}


def run(bench: Bench) -> None:
    import torch

    try:
        if bench.machine.is_gpu:
            major, minor = map(int, arch_capability(device_arch()).split("."))
            check_capability((major, minor), device_name())
        check_product(torch.device(bench.machine.device))
    except ConfigError as error:
        raise Skipped(str(error)) from error
    bench.record.attempt("products", lambda: _products(bench))
    bench.record.attempt("passes", lambda: _passes(bench))
    bench.record.attempt("tokens", lambda: _tokens(bench))


def _products(bench: Bench) -> None:
    """Time one layer's four GEMMs with row quantization, and check that a row alone gives the same bits."""
    form = bench.options.forms[0]
    shape, rows = (DRY_SHAPE, DRY_ROWS) if bench.is_dry else (SHAPES[form], ROWS)
    found: dict[int, dict[str, float]] = {n: dict.fromkeys(("bf16", "fp8", "rows", "parted", "apart"), 0) for n in rows}
    errors = [_matrix(bench, shape, i, found) for i in range(len(matrices(shape)))]
    bench.record.value("error of a product", max(errors))
    bench.record.table(
        f"{form}: one layer's products",
        ("rows", "bf16 ms", "fp8 ms", "of it quantizing", "bf16 rows not as alone", "fp8 rows not as alone"),
        [
            (n, *(f"{t[name]:.4f}" for name in ("bf16", "fp8", "rows")), int(t["parted"]), int(t["apart"]))
            for n, t in found.items()
        ],
        "A row that is not as alone has other bits than a product of that row only: the library chose another kernel, "
        "and tokens may differ with and without speculation where two logits tie.",
    )


def _matrix(bench: Bench, shape: DecoderShape, index: int, found: dict[int, dict[str, float]]) -> float:
    """Add one matrix's times; return the relative error of its GEMM against the exact product of the fp8 operands."""
    import torch

    machine = bench.machine
    num_out, num_in = matrices(shape)[index]
    generator = machine.generator(bench.options.seed + index)
    launcher = machine.launcher("quantize_rows")
    scale, product = quantize_rows, scaled_linear
    if launcher is not None:
        ops = Ops({"quantize_rows": launcher.launcher}, launcher.stream, machine.num_sms)
        scale, product = ops.scaled_rows, ops.scaled_linear

    def random(num_rows: int) -> Tensor:
        return torch.randn(num_rows, num_in, generator=generator, device=machine.device).bfloat16()

    plain = [random(num_out) / math.sqrt(num_in) for _ in range(num_copies(2 * num_out * num_in, machine.l2_bytes))]
    scaled = [quantize_rows(weight) for weight in plain]
    scaled += [quantize_rows(random(num_out)) for _ in range(len(plain))]  # half the size each, so twice as many
    linear = torch.nn.functional.linear
    error = 0.0
    for n, t in found.items():
        x = random(n)
        t["bf16"] += machine.time_ms([lambda w=w, x=x: linear(x, w) for w in plain], 5)  # type: ignore[misc]
        t["fp8"] += machine.time_ms([lambda w=w, x=x: product(x, w, None) for w in scaled], 5)  # type: ignore[misc]
        t["rows"] += machine.time_ms([lambda x=x: scale(x)], 5)  # type: ignore[misc]
        t["parted"] += rows_not_as_alone(lambda rows: linear(rows, plain[0]), x)
        y = product(x, scaled[0], None)
        t["apart"] += rows_not_as_alone(lambda rows: product(rows, scaled[0], None), x)
        wanted = scaled_linear_reference(x.float(), scaled[0], None)
        error = max(error, float(torch.linalg.norm(y.float() - wanted) / torch.linalg.norm(wanted)))
    return error


def _passes(bench: Bench) -> None:
    """Time target passes with rejection sampling, as in the section "steps", and record the size of the weights."""
    dry, form = bench.is_dry, bench.options.forms[0]
    sizes, context = (DRY_BATCH_SIZES, DRY_CONTEXT) if dry else (BATCH_SIZES, CONTEXT)
    limits = PairLimits(max(sizes), context + 32, max(64 if dry else 1024, max(sizes) * max(ROWS_EACH)))
    times: dict[tuple[int, int], list[float]] = {}
    memory = []
    for quantization in BOTH:
        with open_pair(bench, form, limits, quantization=quantization) as pair:
            sizes_gib = [engine.weight_bytes / (1 << 30) for engine in (pair.target, pair.draft)]
            memory.append((NAMES[quantization], *(f"{size:.6f}" for size in sizes_gib)))
            probe = PairProbe(pair, context)
            probe.fill()
            for batch_size in sizes:
                for each in ROWS_EACH:
                    point = Point("verify", "all", batch_size * each, batch_size, probe.limits.max_context)
                    ms = time_step(probe.runner(point), DRY_NUM_RUNS if dry else NUM_RUNS)
                    times.setdefault((batch_size, each), []).append(ms)
    rows = [
        (*key, *(f"{ms:.3f}" for ms in pair_ms), f"{pair_ms[0] / pair_ms[1]:.2f}") for key, pair_ms in times.items()
    ]
    header = ("requests", "rows each", "bf16 ms", "fp8 ms", "bf16 over fp8")
    bench.record.table(f"{form}: target passes with their acceptance test", header, rows, f"Context {context}.")
    bench.record.table(
        f"{form}: weights in device memory",
        ("", "target GiB", "draft GiB"),
        memory,
        "Embedding and LM head stay in bf16.",
    )


def _tokens(bench: Bench) -> None:
    """Compare greedy tokens in fp8 with and without speculation, and with bf16."""
    dry = bench.is_dry
    concurrency, settings = (DRY_CONCURRENCY, DRY_SETTINGS) if dry else (CONCURRENCY, SETTINGS)
    limits = PairLimits(concurrency, prompt_len(bench) + max_tokens(bench) + 16, 64 if dry else 2048)
    with open_pair(bench, TOKENS_FORM, limits, quantization=Quantization.FP8) as pair:
        scaled = greedy(bench, pair, concurrency, {spelling: policy_of(pair, spelling) for spelling in settings})
    jobs = [Job(prompt, SamplingParams(max_tokens=max_tokens(bench))) for prompt in bench_prompts(bench).token_ids]
    with open_pair(bench, TOKENS_FORM, limits) as pair:
        plain = tokens_of(pair, "off", jobs, concurrency)
    common = sum(common_prefix(left, right) for left, right in zip(scaled, plain, strict=True))
    bench.record.value("tokens as in bf16", common / sum(map(len, plain)))
