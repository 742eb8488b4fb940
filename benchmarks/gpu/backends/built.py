"""The trained pair in an engine directory of a GPU backend, not enlarged, so that no section writes gigabytes."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import OpenPair, exit_layers
from benchmarks.gpu.skipped import Skipped
from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_dir import MANIFEST_FILE, EngineDir
from faser_trtllm.builder.network.vendor import MODULES, rtx_refusal
from faser_trtllm.builder.plan_file import arch_capability
from faser_trtllm.engine.opening import OpenRequest
from faser_trtllm.models.config import load_model_config
from faser_trtllm.ops.cuda.driver import device_arch

REFERENCE = "cuda"
LIMITS = PairLimits(max_batch_size=16, max_seq_len=512, max_num_tokens=512, max_draft_len=8)
DRY_LIMITS = PairLimits(max_batch_size=4, max_seq_len=48, max_num_tokens=32, max_draft_len=8)


def check_installed(bench: Bench, backend: str) -> None:
    """Raise Skipped without the module of the backend's name, or on a GPU that it refuses."""
    if backend == REFERENCE:
        return
    if importlib.util.find_spec(backend) is None:
        raise Skipped(f"{backend} is not installed; {MODULES[backend]}")
    if backend == "tensorrt" and not bench.machine.is_gpu:
        raise Skipped("full TensorRT builds on a GPU only")
    if backend == "tensorrt_rtx" and bench.machine.is_gpu and (why := rtx_refusal(arch_capability(device_arch()))):
        raise Skipped(why)


def limits_of(bench: Bench) -> PairLimits:
    return DRY_LIMITS if bench.is_dry else LIMITS


def engine_path(bench: Bench, backend: str) -> Path:
    return bench.file("engines") / backend


def build(bench: Bench, backend: str) -> EngineDir:
    """Build the engines of a backend unless they exist; raises like build_engines."""
    options, limits = bench.options, limits_of(bench)
    engines = build_engines(
        BuildOptions(
            options.checkpoint_dir,
            options.draft_checkpoint_dir,
            engine_path(bench, backend),
            backend=backend,
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            max_seq_len=limits.max_seq_len,
            max_draft_len=limits.max_draft_len,
            exit_layers=exit_layers(load_model_config(options.checkpoint_dir)),
        )
    )
    assert engines is not None  # None is for dry runs
    return engines


def open_built(bench: Bench, backend: str) -> OpenPair:
    """Build and open the engines of a backend; raises like build and open_engines."""
    path = engine_path(bench, backend)
    engines = build(bench, backend)
    built = engines.build_config
    num_blocks = built.max_batch_size * -(-built.max_seq_len // built.tokens_per_block)
    with ExitStack() as guard:
        stack = guard.enter_context(ExitStack())
        opened = bench.machine.open_engines(OpenRequest(engines, built, num_blocks, drafting=True), stack)
        limits = PairLimits(built.max_batch_size, built.max_seq_len, built.max_num_tokens, built.max_draft_len)
        pair = OpenPair(backend, opened, (path / MANIFEST_FILE).read_bytes(), limits, stack)
        guard.pop_all()
        return pair
