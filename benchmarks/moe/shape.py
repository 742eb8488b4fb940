"""Time one row in a mixture of a large model's shape; layers have separate memory but the same weights.

    python -m benchmarks.moe.shape --output_dir out --work_dir big

The default is Qwen3-30B-A3B's shape in 4 bits, a file of 17 GB, which must fit in memory. It is kept in work_dir.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.environment import CpuMeter, describe_environment
from benchmarks.moe.model import MoeSizes, MoeWeights
from benchmarks.peers.bits.machine import measure_machine
from faser_trtllm.builder.cpu_engine import engine_model, engine_tensors
from faser_trtllm.builder.engine_file import EngineFile, TensorSource, write_engine_file
from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.models.config import ModelConfig, parse_model_config
from faser_trtllm.models.quantized_weight import Scheme
from faser_trtllm.partition.core_set import CoreSet

# Qwen3-30B-A3B with a different vocabulary.
SIZES = MoeSizes(num_layers=48, hidden_size=2048, num_experts=128, top_k=8, expert_size=768)
VOCAB_SIZE = 151936
CONTEXT, BLOCK = 128, 32
EMBEDDING_SCALE = 1.0


@dataclass(frozen=True)
class Decode:
    """Medians over steps of one row of one request. read_bytes: bytes of weights that a row reads."""

    ms: float
    distinct_experts: float
    read_bytes: float
    file_bytes: int
    resident_bytes: int
    bound_ms: float | None

    def line(self) -> str:
        bound = "" if self.bound_ms is None else f", {100 * self.bound_ms / self.ms:.0f} % of the memory bound"
        return (
            f"{1e3 / self.ms:.2f} tokens/s ({self.ms:.1f} ms), {self.distinct_experts:.1f} experts of a layer, "
            f"{self.read_bytes / 1e9:.2f} GB read: {self.read_bytes / self.ms / 1e6:.1f} GB/s{bound}; resident "
            f"{self.resident_bytes / 1e9:.2f} GB, {self.resident_bytes / self.file_bytes:.3f} of the file's "
            f"{self.file_bytes / 1e9:.2f} GB"
        )


def model_config(sizes: MoeSizes, vocab_size: int) -> ModelConfig:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    return parse_model_config(sizes.settings() | heads | {"vocab_size": vocab_size})


def write_shape(path: Path, config: ModelConfig, scheme: Scheme | None) -> None:
    """Write an engine file; memory holds one packed layer and the matrix that is being packed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = list(repeated(config, scheme))
    staged = path.with_suffix(".tmp")
    write_engine_file(staged, engine_model(config, 1024), [0, config.num_layers], tensors, scheme=scheme)
    staged.rename(path)


def repeated(config: ModelConfig, scheme: Scheme | None) -> Iterator[tuple[str, TensorSource]]:
    """Yield the first layer's tensors under every layer's name."""
    one = replace(config, num_layers=1)
    before: list[tuple[str, TensorSource]] = []
    layer: list[tuple[str, TensorSource]] = []
    after: list[tuple[str, TensorSource]] = []
    for name, source in engine_tensors(one, MoeWeights(EMBEDDING_SCALE), scheme):
        made = source() if callable(source) else source
        found = made if isinstance(made, np.ndarray) else list(made)  # shared by all layers
        (layer if name.startswith("layers.0.") else after if layer else before).append((name, found))
    yield from before
    for i in range(config.num_layers):
        yield from ((re.sub(r"^layers\.0\.", f"layers.{i}.", name), array) for name, array in layer)
    yield from after


def read_bytes(path: Path, distinct_experts: float, num_experts: int) -> float:
    """Return the bytes of weights that a pass of one row reads, with distinct_experts per layer."""
    with EngineFile.open(path) as file:
        sizes = {name: int(entry["nbytes"]) for name, entry in file.header["tensors"].items()}
    experts = sum(nbytes for name, nbytes in sizes.items() if ".expert_" in name)
    others = sum(nbytes for name, nbytes in sizes.items() if ".expert_" not in name and name != "embedding")
    return others + experts * distinct_experts / num_experts


def measure(path: Path, config: ModelConfig, num_steps: int, num_threads: int, work_dir: Path) -> Decode:
    """Time steps of random tokens after a context, after as many warm-up steps."""
    assert config.experts is not None
    times, counts = [], []
    with (
        CoreSet(None, num_threads) as core_set,
        CpuEngine.open(
            path,
            core_set,
            num_blocks=(CONTEXT + BLOCK) // BLOCK,
            tokens_per_block=BLOCK,
            max_batch_size=1,
            max_num_tokens=CONTEXT,
        ) as engine,
    ):
        rng = np.random.default_rng(0)
        tokens = rng.integers(1, config.vocab_size, CONTEXT + 1).astype(np.int32)
        builder = BatchBuilder(np.arange((CONTEXT + BLOCK) // BLOCK, dtype=np.int32).reshape(1, -1))
        builder.add(0, tokens, 0, CONTEXT, 1)
        engine.forward(builder.build())
        for step in range(2 * num_steps):
            tokens[CONTEXT] = rng.integers(1, config.vocab_size)
            builder.clear()
            builder.add(0, tokens, CONTEXT, CONTEXT + 1, 1)
            batch = builder.build()
            start_s = time.perf_counter()
            engine.forward(batch)
            if step >= num_steps:
                times.append(1e3 * (time.perf_counter() - start_s))
                counts.append(engine.distinct_experts)
        status = Path("/proc/self/status").read_text()
        resident_kib = int(re.findall(r"VmRSS:\s+(\d+)", status)[0])
    distinct = statistics.fmean(counts)
    num_bytes = read_bytes(path, distinct, config.experts.num_experts)
    machine = measure_machine(num_threads, tuple(range(num_threads)), work_dir)
    return Decode(
        statistics.median(times),
        distinct,
        num_bytes,
        path.stat().st_size,
        1024 * resident_kib,
        None if machine is None else num_bytes / machine.read_gb_per_s / 1e6,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="directory for shape.json")
    parser.add_argument("--work_dir", type=Path, required=True, help="directory to keep and reuse the engine file")
    parser.add_argument("--quantization", default="W4A8:128", help="quantization, as for `faser build`")
    parser.add_argument("--num_layers", type=int, default=SIZES.num_layers)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--only_write", action="store_true", help="write the engine file only")
    args = parser.parse_args()
    scheme = Scheme.parse(args.quantization)
    scheme = scheme if scheme is None else replace(scheme, lm_head=True)
    config = model_config(replace(SIZES, num_layers=args.num_layers), VOCAB_SIZE)
    path = args.work_dir / f"{args.num_layers}-{args.quantization.replace(':', '-')}.engine"
    if not path.exists():
        write_shape(path, config, scheme)
    if args.only_write:
        return
    meter, environment = CpuMeter(), describe_environment(tuple(sys.argv))
    found = measure(path, config, args.steps, args.num_threads, args.work_dir)
    print(found.line())
    args.output_dir.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {"environment": environment | meter.shares(), "quantization": args.quantization}
    data |= {"layers": args.num_layers, "num_threads": args.num_threads, **asdict(found)}
    (args.output_dir / "shape.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
