"""A test for leaks of device memory over many shapes, after every kind of pass has run.

Plugins compiled ahead of time have leaked a module for every pass of a new shape (NVIDIA/TensorRT issue 4849).
"""

from __future__ import annotations

import numpy as np

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines.exactness import tokens_of
from benchmarks.gpu.models.pair import OpenPair
from benchmarks.gpu.models.prompts import bench_prompts
from benchmarks.policies.workload import Job
from faser_trtllm.core.sampling_params import SamplingParams

SETTINGS = ("fixed:2", "fixed:4,mode=draft_ahead", "fixed:8,mode=ping_pong", "off")  # one lap each
NUM_LAPS, DRY_NUM_LAPS = 40, 12
WARM_LAPS = 2 * len(SETTINGS)
JOBS_PER_LAP, DRY_JOBS_PER_LAP = 48, 4
MAX_GROWTH_BYTES = 16 << 20  # allows for other processes; a leak of 0.5 MiB per lap shows


def soak(bench: Bench, pair: OpenPair) -> None:
    """Decode laps of requests of random lengths under policies in turn, and compare the memory held after each."""
    dry = bench.is_dry
    num_laps, num_jobs = (DRY_NUM_LAPS, DRY_JOBS_PER_LAP) if dry else (NUM_LAPS, JOBS_PER_LAP)
    runtime = pair.target.runtime
    rng = np.random.default_rng(bench.options.seed)
    held: list[int] = []
    for lap in range(num_laps):
        if not dry and bench.left_s < 0 and lap > WARM_LAPS:
            break
        tokens_of(pair, SETTINGS[lap % len(SETTINGS)], _jobs(bench, pair, num_jobs, rng), pair.limits.max_batch_size)
        held.append(runtime.memory_bytes())
    warm, last = held[WARM_LAPS - 1], held[-1]
    rows = [(lap + 1, f"{bytes_ / (1 << 20):.1f}") for lap, bytes_ in enumerate(held) if lap % len(SETTINGS) == 3]
    bench.record.table(
        "Device memory held after laps of random shapes",
        ("laps", "MiB"),
        rows,
        f"{num_jobs} requests per lap. The first {WARM_LAPS} laps warm up. All processes of the GPU are counted.",
    )
    bench.record.value("memory growth MiB", (last - warm) / (1 << 20))
    if last - warm > MAX_GROWTH_BYTES:
        growth = f"{(last - warm) / (1 << 20):.1f} MiB more after {len(held)} laps than after {WARM_LAPS}"
        bench.record.error(f"{pair.name} holds {growth}, allowed are {MAX_GROWTH_BYTES >> 20}")


def _jobs(bench: Bench, pair: OpenPair, num_jobs: int, rng: np.random.Generator) -> list[Job]:
    """Return jobs that begin with the longest prompt, so that the first lap has the largest pass."""
    limits = pair.limits
    text = np.concatenate([np.array(prompt) for prompt in bench_prompts(bench).token_ids])
    longest = limits.max_seq_len - limits.max_draft_len - 2
    jobs = []
    for number in range(num_jobs):
        prompt_len = longest if number == 0 else int(rng.integers(1, longest + 1))
        most = min(longest + 2 - prompt_len, 2 * limits.max_draft_len)
        first = int(rng.integers(0, text.size))
        prompt = np.resize(np.roll(text, -first), prompt_len)
        sampled = number % 2 == 1
        params = SamplingParams(
            max_tokens=int(rng.integers(1, most + 1)),
            temperature=0.8 if sampled else 0.0,
            seed=number if number % 4 == 1 else None,
        )
        jobs.append(Job(tuple(int(token) for token in prompt), params))
    return jobs
