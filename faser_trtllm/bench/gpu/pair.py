"""An enlarged pair with open engines, and executors over them, one at a time."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from faser_trtllm.bench.gpu.bench import Bench
from faser_trtllm.bench.gpu.cuda_engines import PairEngines, PairLimits, open_engines
from faser_trtllm.bench.gpu.options import DRAFT_OF
from faser_trtllm.config import ExecutorConfig, KvCacheConfig, Quantization
from faser_trtllm.core.clock import MonotonicClock
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import assemble
from faser_trtllm.models.config import ModelConfig, load_model_config
from faser_trtllm.models.enlarge import DecoderShape, EnlargedWeights, num_matrix_parameters, shape_named
from faser_trtllm.models.weights import CheckpointWeights
from faser_trtllm.policy.base import Policy


class Pair:
    """Engines of an enlarged target and draft. Closed with a `with` block."""

    def __init__(
        self,
        form: str,
        engines: PairEngines,
        configs: tuple[ModelConfig, ModelConfig],
        limits: PairLimits,
        stack: ExitStack,
    ) -> None:
        self.form, self.engines, self.limits = form, engines, limits
        self.target, self.draft = engines.target, engines.draft
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
            max_draft_len=self.limits.max_draft_len,
            clock=MonotonicClock(),
            enter_mode=self.engines.enter_mode,
            device_tester=self.engines.tester,
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


def open_pair(
    bench: Bench,
    form: str,
    limits: PairLimits,
    *,
    overlap: bool = False,
    quantization: Quantization = Quantization.NONE,
) -> Pair:
    """Enlarge the trained pair and open cuda engines over it; in a dry run tiny ones, on the CPU.

    overlap: also capture graphs for the modes in which draft and target run side by side.
    """
    with ExitStack() as guard:
        stack = guard.enter_context(ExitStack())
        weights = []
        options = bench.options
        for directory, name in ((options.checkpoint_dir, form), (options.draft_checkpoint_dir, DRAFT_OF[form])):
            config = load_model_config(directory)
            shape = shape_named(name) if bench.machine.is_gpu else dry_shape(config)
            trained = stack.enter_context(CheckpointWeights(directory))
            weights.append(EnlargedWeights(trained, config, shape, options.seed, bench.machine.device))
        exits = exit_layers(weights[0].config)
        engines = open_engines(bench.machine, weights, exits, limits, overlap, stack, quantization)
        guard.pop_all()
        return Pair(form, engines, (weights[0].config, weights[1].config), limits, stack)


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
