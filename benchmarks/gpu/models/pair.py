"""Open engines of a pair with executors, one at a time, and enlarged pairs without files."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models.cuda_engines import PairLimits, open_engines
from benchmarks.gpu.models.enlarge import DecoderShape, EnlargedWeights, num_matrix_parameters, shape_named
from benchmarks.gpu.options import DRAFT_OF, GpuBenchOptions
from faser_trtllm.builder.engine_dir import sha256_of
from faser_trtllm.config import ExecutorConfig, KvCacheConfig, Quantization
from faser_trtllm.core.clock import MonotonicClock
from faser_trtllm.engine.opening import OpenedEngines
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import assemble
from faser_trtllm.models.config import ModelConfig, load_model_config
from faser_trtllm.models.weights import CheckpointWeights
from faser_trtllm.policy.base import Policy

P = TypeVar("P", bound="OpenPair")


class OpenPair:
    """Engines of a target and a draft, a context manager. made_of: bytes for a cost table's fingerprint."""

    def __init__(self, name: str, engines: OpenedEngines, made_of: bytes, limits: PairLimits, stack: ExitStack) -> None:
        self.name, self.engines, self.made_of, self.limits = name, engines, made_of, limits
        self.target: Any = engines.target  # GpuEngine; the protocol of all engines has no partitions
        self.draft: Any = engines.draft
        self._stack = stack

    def executor(self, policy: Policy) -> Executor:
        """Return an executor on the open engines; close it before creating the next one."""
        drafting = policy.name != "off"
        return assemble(
            self.target,
            self.draft if drafting else None,
            policy,
            # Prompts repeat, and reuse would skip later prefills.
            ExecutorConfig(kv_cache_config=KvCacheConfig(enable_block_reuse=False)),
            max_seq_len=self.limits.max_seq_len,
            max_draft_len=self.limits.max_draft_len,
            clock=MonotonicClock(),
            enter_mode=self.engines.enter_mode,
            sampler=self.engines.sampler,
        )

    def __enter__(self: P) -> P:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class Pair(OpenPair):
    """Engines of an enlarged target and draft."""

    def __init__(
        self,
        form: str,
        engines: OpenedEngines,
        made_of: bytes,
        configs: tuple[ModelConfig, ModelConfig],
        limits: PairLimits,
        stack: ExitStack,
    ) -> None:
        super().__init__(form, engines, made_of, limits, stack)
        self.target_config, self.draft_config = configs

    def step_bytes(self, num_requests: int, context_len: float) -> float:
        """Return the minimum bytes that a target pass reads: its bf16 matrices and the requests' caches."""
        config = self.target_config
        kv = 4 * config.num_layers * config.num_kv_heads * config.head_dim
        return 2.0 * num_matrix_parameters(config) + kv * num_requests * context_len

    def step_flops(self, num_rows: int, context_len: float) -> float:
        config = self.target_config
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * context_len
        return num_rows * (2.0 * num_matrix_parameters(config) + attention)

    def describe(self) -> str:
        target, draft = (num_matrix_parameters(config) / 1e9 for config in (self.target_config, self.draft_config))
        return (
            f"{self.name}: the trained pair enlarged to {target:.2f}B and {draft:.3f}B parameters in matrices and a "
            f"vocabulary of {self.target_config.vocab_size}, the same function"
        )


def open_pair(
    bench: Bench,
    form: str,
    limits: PairLimits,
    *,
    overlap: bool = False,
    quantization: Quantization = Quantization.NONE,
    deterministic: bool = False,
) -> Pair:
    """Enlarge the trained pair and open its cuda engines; in a dry run tiny ones on the CPU.

    overlap: also capture graphs for the modes in which draft and target run concurrently.
    """
    with ExitStack() as guard:
        stack = guard.enter_context(ExitStack())
        weights = []
        options = bench.options
        for directory, name in ((options.checkpoint_dir, form), (options.draft_checkpoint_dir, DRAFT_OF[form])):
            config = load_model_config(directory)
            shape = dry_shape(config, shape_named(name)) if bench.is_dry else shape_named(name)
            trained = stack.enter_context(CheckpointWeights(directory))
            weights.append(EnlargedWeights(trained, config, shape, options.seed, bench.machine.device))
        exits = exit_layers(weights[0].config)
        engines = open_engines(bench.machine, weights, exits, limits, overlap, stack, quantization, deterministic)
        guard.pop_all()
        files = [sha256_of(path) for path in checkpoint_files(options)]
        made_of = json.dumps([form, options.seed, limits.max_draft_len, quantization.value, *files]).encode()
        return Pair(form, engines, made_of, (weights[0].config, weights[1].config), limits, stack)


def checkpoint_files(options: GpuBenchOptions) -> list[Path]:
    """Return the files of the trained pair that its engines depend on."""
    folders = (options.checkpoint_dir, options.draft_checkpoint_dir)
    return [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in (".json", ".safetensors")]


def dry_shape(config: ModelConfig, shape: DecoderShape) -> DecoderShape:
    """Return a shape that is slightly larger than the trained model in every enlarged dimension."""
    return DecoderShape(
        config.hidden_size + 32,
        config.intermediate_size + 32,
        config.num_layers + 1,
        2 * config.num_heads,
        2 * config.num_kv_heads,
        config.head_dim,
        2 * config.vocab_size if shape.vocab_size else 0,
    )


def exit_layers(config: ModelConfig) -> tuple[int, ...]:
    """Return exit layers at a quarter and at half of the depth."""
    return tuple(sorted({layer for layer in (config.num_layers // 4, config.num_layers // 2) if layer > 0}))
