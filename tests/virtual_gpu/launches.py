"""Launches of a decoder layer, of the rest of a pass, and of a draft step, counted by the virtual GPU's driver.

    python -m tests.virtual_gpu.launches     # a table

A kernel of ours is one launch, and so is each operation of torch that is not a view: a GPU may need more for one (topk,
cumsum), never less. Torch computes rms_norm in eight operations on devices that it does not know, and in one kernel on
a GPU; it is counted as one. Copies between host and device are left out. Nothing is captured in graphs, whose nodes are
the same launches.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from faser_trtllm.builder.cuda_engine_file import CudaFile
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import Quantization
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import DraftBatch
from faser_trtllm.engine.cuda.engine import make_engine
from faser_trtllm.engine.cuda.weights import DeviceWeights
from faser_trtllm.engine.gpu.decoder import Placement
from faser_trtllm.engine.gpu.device import CudaGpu
from faser_trtllm.engine.gpu.engine import GpuEngine
from faser_trtllm.engine.gpu.limits import GpuLimits
from faser_trtllm.sampling.table import SamplingTable
from tests.engine.cuda.harness import build_moe_pair, build_pair
from tests.support.engine_harness import Harness
from tests.virtual_gpu.device.counters import Counters
from tests.virtual_gpu.process import VirtualGpuProcess

Launches = Counter[str]
NUM_REQUESTS = 3
MAX_DRAFT_LEN = 4
LONG_CONTEXT = 800  # tokens, that attention splits
MODES = {"greedy": (0.0, None), "seeded": (0.8, 7), "unseeded": (0.8, None)}  # temperature, seed
RMS_NORM = Counter(
    {
        "aten._to_copy.default": 2,
        "aten.mul.Tensor": 2,
        **{f"aten.{name}": 1 for name in ("add_.Scalar", "mean.dim", "pow.Tensor_Scalar", "rsqrt.default")},
    }
)
MODELS: dict[str, dict[str, str]] = {
    "Llama": {},
    "Qwen2": {"architecture": "qwen2"},
    "Qwen3": {"architecture": "qwen3"},
}


def of_pass(
    engines: EngineDir, quantization: Quantization = Quantization.NONE, context: int = 1, deterministic: bool = False
) -> Launches:
    """A pass of the target with a row per request at the end of `context` tokens."""
    with CudaGpu() as gpu, _open(gpu, engines.target_path, quantization, deterministic=deterministic) as engine:
        harness, tokens = Harness(engine), [7] * context
        rows = [(slot, tokens, context - 1, context) for slot in range(NUM_REQUESTS)]
        return _counted(engine, lambda: harness.run(rows))


def of_drafts(engines: EngineDir, mode: str, count: int) -> Launches:
    """A call of the draft for `count` tokens of each request."""
    temperature, seed = MODES[mode]
    table = SamplingTable(NUM_REQUESTS, 320, MAX_DRAFT_LEN, new_key=lambda: 99)
    with CudaGpu() as gpu, _open(gpu, engines.draft_path, max_draft_len=MAX_DRAFT_LEN) as engine:
        for slot in range(NUM_REQUESTS):
            params = SamplingParams(max_tokens=50, temperature=temperature, seed=seed)
            table.bind(
                slot, Request(str(slot), [1], params, max_seq_len=64, max_draft_len=MAX_DRAFT_LEN, keep_candidates=True)
            )
        batch = Harness(engine).batch([(slot, [1], 0, 1) for slot in range(NUM_REQUESTS)])
        ones = np.ones(NUM_REQUESTS, np.int32)
        wanted = DraftBatch(batch, table.array, ones, 0 * ones, count * ones, MAX_DRAFT_LEN, None)
        return _counted(engine, lambda: engine.draft(wanted))


def _open(
    gpu: CudaGpu,
    path: Path,
    quantization: Quantization = Quantization.NONE,
    max_draft_len: int = 0,
    deterministic: bool = False,
) -> GpuEngine:
    runtime = gpu.make_runtime()
    with CudaFile.open(path) as file:
        max_seq_len = file.model["max_seq_len"]
        weights = DeviceWeights.load(file, runtime.device, quantization=quantization)
        ops, segments = gpu.make_ops(runtime, file.model["head_dim"], deterministic), file.segments
    limits = GpuLimits(
        num_blocks=NUM_REQUESTS * max_seq_len // 32,
        tokens_per_block=32,
        max_batch_size=NUM_REQUESTS,
        max_num_tokens=32,
        max_seq_len=max_seq_len,
        max_logit_rows=32,
        max_draft_len=max_draft_len,
    )
    return make_engine(weights, segments, Placement(ops, runtime, gpu.whole), limits)


def _counted(engine: GpuEngine, work: Callable[[], object]) -> Launches:
    engine.wait()
    before = Counters.now()
    work()
    engine.wait()
    found: Launches = Counter()
    for items in Counters.now().since(before).work.values():
        found.update({label: count for label, count in items.items() if label.startswith(("aten.", "kernel "))})
    while found >= RMS_NORM:
        found += Counter({"aten.rms_norm": 1})
        found -= RMS_NORM
    return found


def of_layer(
    gpu: VirtualGpuProcess,
    folder: Path,
    quantization: Quantization = Quantization.NONE,
    context: int = 1,
    build: Callable[..., EngineDir] = build_pair,
    deterministic: bool = False,
    **model: Any,
) -> tuple[Launches, Launches]:
    """A layer of a model, as what a third one adds to two; and what a pass has beside its layers."""
    max_seq_len = 512 if context < 512 else 1024
    sizes = {"max_seq_len": max_seq_len, "max_position_embeddings": max_seq_len} | model
    made = (build(folder / str(n), num_layers=n, **sizes) for n in (2, 3))
    two, three = (gpu.run(of_pass, engines, quantization, context, deterministic) for engines in made)
    return three - two, two - three + two


def of_draft_step(gpu: VirtualGpuProcess, engines: EngineDir, mode: str) -> tuple[Launches, Launches]:
    """A draw, and what sets up the next pass."""
    none, one, two = (gpu.run(of_drafts, engines, mode, count) for count in range(3))
    draw = one - none
    return draw, two - one - draw - none


def table(folder: Path) -> list[tuple[str, Launches]]:
    """Return the name of each thing that is counted, and its launches by name."""
    found: list[tuple[str, Launches]] = []
    with VirtualGpuProcess() as gpu:
        for name, model in MODELS.items():
            layer, rest = of_layer(gpu, folder / name, **model)
            found += [(f"a layer, {name}", layer), (f"the rest of a pass, {name}", rest)]
        found.append(("a layer, long contexts", of_layer(gpu, folder / "long", context=LONG_CONTEXT)[0]))
        found.append(("a layer, mixture of experts", of_layer(gpu, folder / "moe", build=build_moe_pair)[0]))
        found.append(("a layer, fp8", of_layer(gpu, folder / "fp8", Quantization.FP8)[0]))
        pair = build_pair(folder / "drafts")
        for mode in MODES:
            draw, inputs = of_draft_step(gpu, pair, mode)
            found += [(f"a draw, {mode}", draw), (f"the next pass's inputs, {mode}", inputs)]
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for what, launches in table(Path(folder)):
            print(f"{what}: {launches.total()}")
            for label, count in sorted(launches.items()):
                print(f"    {count} {label}")
