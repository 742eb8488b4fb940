"""An enlarged pair with open engines, and executors over them, one at a time."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from faser_trtllm.bench.gpu.bench import Bench
from faser_trtllm.bench.gpu.options import DRAFT_OF
from faser_trtllm.builder.cpu_engine import CpuBackend
from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.builder.source import Source
from faser_trtllm.config import ExecutorConfig, KvCacheConfig
from faser_trtllm.core.clock import MonotonicClock
from faser_trtllm.engine.base import Engine
from faser_trtllm.engine.cpu import CpuEngine
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import assemble
from faser_trtllm.models.config import ModelConfig, load_model_config
from faser_trtllm.models.enlarge import DecoderShape, EnlargedWeights, num_matrix_parameters, shape_named
from faser_trtllm.models.weights import CheckpointWeights
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.policy.base import Policy

TOKENS_PER_BLOCK = 32


@dataclass(frozen=True)
class PairLimits:
    """What the engines are opened for."""

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    max_draft_len: int = 8

    @property
    def num_blocks(self) -> int:
        return self.max_batch_size * -(-self.max_seq_len // TOKENS_PER_BLOCK)


class Pair:
    """Engines of an enlarged target and draft. Closed with a `with` block."""

    def __init__(
        self,
        form: str,
        target: Engine,
        draft: Engine,
        configs: tuple[ModelConfig, ModelConfig],
        limits: PairLimits,
        stack: ExitStack,
    ) -> None:
        self.form, self.target, self.draft, self.limits = form, target, draft, limits
        self.target_config, self.draft_config = configs
        self._stack = stack

    def executor(self, policy: Policy) -> Executor:
        """An executor over the open engines; close it before the next one is asked for."""
        drafting = policy.name != "off"
        return assemble(
            self.target,
            self.draft if drafting else None,
            policy,
            # The same prompts come round again, and reuse would skip their prefill from the second time on.
            ExecutorConfig(kv_cache_config=KvCacheConfig(enable_block_reuse=False)),
            max_seq_len=self.limits.max_seq_len,
            max_draft_len=self.limits.max_draft_len if drafting else 0,
            clock=MonotonicClock(),
        )

    def step_bytes(self, num_requests: int, context_len: float) -> float:
        """The fewest bytes that a target pass reads: its matrices in bf16, and the caches of the requests."""
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
            f"{self.form}: the trained pair enlarged to {target:.2f}B and {draft:.3f}B parameters in matrices (the "
            "vocabulary is the tokenizer's), the same function"
        )

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def open_pair(bench: Bench, form: str, limits: PairLimits) -> Pair:
    """Enlarge the trained pair and open its engines: cuda engines, in a dry run CPU engines of tiny shapes."""
    with ExitStack() as guard:
        stack = guard.enter_context(ExitStack())
        weights = []
        options = bench.options
        for directory, name in ((options.checkpoint_dir, form), (options.draft_checkpoint_dir, DRAFT_OF[form])):
            config = load_model_config(directory)
            shape = shape_named(name) if bench.machine.is_gpu else dry_shape(config)
            trained = stack.enter_context(CheckpointWeights(directory))
            weights.append(EnlargedWeights(trained, config, shape, options.seed, bench.machine.device))
        target, draft = (
            _open_cuda(weights, limits, stack) if bench.machine.is_gpu else _open_cpu(weights, limits, stack)
        )
        guard.pop_all()
        return Pair(form, target, draft, (weights[0].config, weights[1].config), limits, stack)


def dry_shape(config: ModelConfig) -> DecoderShape:
    """A little larger than the trained model, in every way."""
    return DecoderShape(
        config.hidden_size + 32,
        config.intermediate_size + 32,
        config.num_layers + 1,
        2 * config.num_heads,
        2 * config.num_kv_heads,
        config.head_dim,
    )


def exit_layers(config: ModelConfig) -> tuple[int, ...]:
    """Where rows may be pruned: at a quarter and at half of the depth."""
    return tuple(sorted({layer for layer in (config.num_layers // 4, config.num_layers // 2) if layer > 0}))


def _open_cpu(weights: list[EnlargedWeights], limits: PairLimits, stack: ExitStack) -> tuple[Engine, Engine]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faser-gpu-dry-")))
    cores = stack.enter_context(CoreSet(None, None))
    engines: list[Engine] = []
    for role, made in zip(("target", "draft"), weights, strict=True):
        config = made.config
        exits = exit_layers(config) if role == "target" else ()
        source = Source(role, folder, config, made, (0, *exits, config.num_layers), ())
        built = BuildConfig(
            limits.max_batch_size, limits.max_num_tokens, limits.max_seq_len, limits.max_draft_len, TOKENS_PER_BLOCK
        )
        path = folder / f"{role}.engine"
        CpuBackend().write_engine(path, source, built, None)
        engine = CpuEngine.open(
            path,
            cores,
            num_blocks=limits.num_blocks,
            tokens_per_block=TOKENS_PER_BLOCK,
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            max_seq_len=limits.max_seq_len,
        )
        engines.append(stack.enter_context(engine))
    return engines[0], engines[1]


def _open_cuda(weights: list[EnlargedWeights], limits: PairLimits, stack: ExitStack) -> tuple[Engine, Engine]:
    raise NotImplementedError
