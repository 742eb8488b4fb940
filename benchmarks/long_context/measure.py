"""Measure long prompts in the executor: a prompt's chunks, decoding after it, and a second request on its prefix."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig, parse
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.config import load_model_config

QUESTION_LEN = 16  # tokens after the prefix that two requests share


@dataclass(frozen=True)
class LongPrompt:
    """One length. prefill_s: time to the first token. first_chunk_s, last_chunk_s: its first and last pass.

    decode_ms: median of a decode step after the prompt. kv_bytes: KV of the prompt's tokens.
    reuse_s: time to the first token of a second request that shares all but the last QUESTION_LEN tokens, num_reused of
    which were found in the cache.
    """

    num_tokens: int
    num_chunks: int
    prefill_s: float
    first_chunk_s: float
    last_chunk_s: float
    decode_ms: float
    kv_bytes: int
    reuse_s: float
    num_reused: int


def build_long(checkpoint_dir: Path, output_dir: Path, max_seq_len: int, chunk: int) -> Path:
    """Build an engine with more positions than the checkpoint was trained on, for times, not for text."""
    folder = output_dir / "checkpoint"
    folder.mkdir()
    for path in checkpoint_dir.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path.resolve())
    settings = json.loads((checkpoint_dir / "config.json").read_text()) | {"max_position_embeddings": max_seq_len}
    (folder / "config.json").write_text(json.dumps(settings))
    build_engines(
        BuildOptions(
            checkpoint_dir=folder,
            draft_checkpoint_dir=None,
            output_dir=output_dir / "engines",
            max_batch_size=2,
            max_num_tokens=chunk,
            max_seq_len=max_seq_len,
        )
    )
    return output_dir / "engines"


def measure(engine_dir: Path, lengths: Sequence[int], num_decode_steps: int, num_threads: int) -> list[LongPrompt]:
    """Measure each length with a new executor, so that no other prefix is in the cache.

    With one thread times are CPU time, which other work on the machine disturbs least.
    """
    engines = EngineDir.load(engine_dir)
    vocab_size = load_model_config(engine_dir.parent / "checkpoint").vocab_size
    found = []
    for length in lengths:
        config = parse(ExecutorConfig, {"speculation": "off", "num_threads": num_threads})
        with open_executor(engine_dir, config) as executor:
            rng = np.random.default_rng(length)
            tokens = rng.integers(1, vocab_size, length).tolist()
            clock = time.process_time if num_threads == 1 else time.perf_counter
            times, first = _run(executor, tokens, 1 + num_decode_steps, _Sink(), clock)
            chunks, steps = times[:first], times[first:]
            again = tokens[:-QUESTION_LEN] + rng.integers(1, vocab_size, QUESTION_LEN).tolist()
            sink = _Sink()
            reuse, _ = _run(executor, again, 1, sink, clock)
            found.append(
                LongPrompt(
                    num_tokens=length,
                    num_chunks=len(chunks),
                    prefill_s=sum(chunks),
                    first_chunk_s=chunks[0],
                    last_chunk_s=chunks[-1],
                    decode_ms=1e3 * statistics.median(steps),
                    kv_bytes=length * engines.kv_bytes_per_token(),
                    reuse_s=sum(reuse),
                    num_reused=sink.stats.num_cached_tokens,
                )
            )
    return found


class _Sink:
    def __init__(self) -> None:
        self.num_tokens = 0
        self.finished = False
        self.stats: Any = None

    def __call__(self, output: Any) -> bool:
        self.num_tokens += len(output.new_token_ids)
        self.finished = output.finish_reason is not None
        self.stats = output.request.stats
        return False


def _run(
    executor: Executor, tokens: list[int], max_tokens: int, sink: _Sink, clock: Callable[[], float]
) -> tuple[list[float], int]:
    """Return the seconds of every step, and the number of steps to the first token."""
    executor.submit(f"long-{max_tokens}", tokens, SamplingParams(max_tokens=max_tokens, temperature=0.0), sink)
    times: list[float] = []
    first = 0
    while not sink.finished:
        start = clock()
        executor.step()
        times.append(clock() - start)
        if sink.num_tokens and not first:
            first = len(times)
    return times, first
