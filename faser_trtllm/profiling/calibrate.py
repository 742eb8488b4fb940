"""Decode real prompts to measure a step's overhead and calibrate early exit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from faser_trtllm.backends import find_backend
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig, KvCacheConfig
from faser_trtllm.core.clock import MonotonicClock
from faser_trtllm.core.cost_table import CostTable, ExitModel
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.opening import OpenRequest, open_engines
from faser_trtllm.errors import InvalidArgumentError, reason_of
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import assemble
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.profiling.exit_models import ExitQuality, fit_exit_models, judge
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.prompts import draw_prompts
from faser_trtllm.profiling.recording import RecordingPolicy

NUM_DRAFT_TOKENS = 6
BATCH_SIZE = 8
NUM_SINGLE = 4  # prompts decoded one by one, where a step's overhead is most visible
TEMPERATURE = 0.8  # used for every other prompt; the rest are greedy

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Calibration:
    exits: tuple[ExitModel, ...] = ()
    quality: tuple[ExitQuality, ...] = ()
    num_observations: int = 0
    overhead_ms: float = 0.0


def calibrate(
    engines: EngineDir, prompts: Sequence[Sequence[int]], table: CostTable, options: ProfileOptions, say: Progress
) -> Calibration:
    """Decode prompts and measure a step's overhead; with exit layers and options.calibrate also fit exit models."""
    with ExitStack() as stack:
        executor, policy, layers = _open(engines, options, stack)
        return calibrate_executor(executor, policy, layers, prompts, table, options, say)


def calibrate_executor(
    executor: Executor,
    policy: RecordingPolicy,
    layers: Sequence[int],
    prompts: Sequence[Sequence[int]],
    table: CostTable,
    options: ProfileOptions,
    say: Progress,
) -> Calibration:
    """Run calibrate() on an executor that `policy` watches. layers: the target's EngineSpec.segments."""
    residual_ms: list[float] = []
    for number, prompt in enumerate(prompts[:NUM_SINGLE]):
        residual_ms += _decode(executor, policy, [prompt], number, options)
    overhead_ms = max(0.0, statistics.median(residual_ms)) if residual_ms else 0.0
    # Boundary i comes before segment i, so 0 and the last are not boundaries.
    boundaries = tuple(range(1, len(layers) - 1)) if options.calibrate else ()
    policy.boundaries = boundaries
    for first in range(0, len(prompts) if boundaries else 0, BATCH_SIZE):
        _decode(executor, policy, prompts[first : first + BATCH_SIZE], first, options)
        say("decoding prompts", min(len(prompts), first + BATCH_SIZE), len(prompts))
    if not boundaries:
        return Calibration(overhead_ms=overhead_ms)
    seen = policy.observations()
    models, qualities = fit_exit_models(seen, boundaries, [layers[b] for b in boundaries])
    if table.num_segments:
        acceptance = float(seen.accepted.mean()) if seen.accepted.size else 0.0
        models = judge(models, qualities, table, policy.num_draft_tokens, acceptance)
    return Calibration(tuple(models), tuple(qualities), int(seen.accepted.size), overhead_ms)


def read_prompts(engines: EngineDir, options: ProfileOptions) -> list[list[int]]:
    """Return the ids of the prompt file's lines, cut to fit, or of held-out standard library text."""
    tokenizer = Tokenizer.load(engines.tokenizer_dir)
    max_tokens = options.num_tokens(engines.build_config.max_seq_len)
    longest = engines.build_config.max_seq_len - max_tokens - 1
    if longest < 1:
        raise InvalidArgumentError(
            f"max_tokens is {max_tokens}, the engines allow {engines.build_config.max_seq_len} tokens with the "
            "prompt; lower it"
        )
    if options.prompt_file is None:

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        prompt_len = min(options.prompt_len, longest)
        return [list(ids) for ids in draw_prompts(encode, options.num_prompts, prompt_len, options.seed).token_ids]
    lines = _lines(options.prompt_file)
    prompts = [tokenizer.encode(line)[:longest] for line in lines]
    return [prompt for prompt in prompts if prompt]


def _lines(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"prompt_file {path.name} cannot be read: {reason_of(error)}") from error
    if not lines:
        raise InvalidArgumentError(f"prompt_file {path.name} holds no prompt")
    return lines


def _open(
    engines: EngineDir, options: ProfileOptions, stack: ExitStack
) -> tuple[Executor, RecordingPolicy, tuple[int, ...]]:
    built = engines.build_config
    on_cpu = find_backend(engines.backend).on_cpu
    core_set = stack.enter_context(CoreSet(options.cores, options.num_threads)) if on_cpu else None
    max_batch_size = min(BATCH_SIZE, built.max_batch_size)
    num_blocks = max_batch_size * -(-built.max_seq_len // built.tokens_per_block)
    limits = replace(built, max_batch_size=max_batch_size)
    opened = open_engines(OpenRequest(engines, limits, num_blocks, drafting=True, core_set=core_set), stack)
    policy = RecordingPolicy(min(NUM_DRAFT_TOKENS, built.max_draft_len))
    executor = assemble(
        opened.target,
        opened.draft,
        policy,
        ExecutorConfig(kv_cache_config=KvCacheConfig(enable_block_reuse=False)),
        max_seq_len=built.max_seq_len,
        max_draft_len=built.max_draft_len,
        clock=MonotonicClock(),
        sampler=opened.sampler,
    )
    stack.enter_context(executor)
    executor.watch(policy)
    return executor, policy, opened.target.spec.segments


def _decode(
    executor: Executor,
    policy: RecordingPolicy,
    prompts: Sequence[Sequence[int]],
    first: int,
    options: ProfileOptions,
) -> list[float]:
    """Run the prompts to the end; return each pure decoding step's ms outside of drafting and verification."""
    for number, prompt in enumerate(prompts, first):
        params = SamplingParams(
            max_tokens=options.num_tokens(executor.max_seq_len),
            temperature=TEMPERATURE if number % 2 else 0.0,
            seed=options.seed + number if number % 4 == 1 else None,
        )
        executor.submit(f"profile-{number}", prompt, params, lambda output: False)
    residual_ms: list[float] = []
    while True:
        num_before = len(policy.steps)
        start = time.perf_counter()
        if not executor.step():
            return residual_ms
        ms = 1e3 * (time.perf_counter() - start)
        if len(policy.steps) > num_before and not policy.boundaries:
            has_prompts, step_ms = policy.steps[-1]
            if not has_prompts:
                residual_ms.append(ms - step_ms)
