"""The requests of sections that decode under load: held-out prompts, half greedy and half sampled."""

from __future__ import annotations

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models.prompts import max_tokens
from benchmarks.policies.workload import JOBS_PER_STREAM, Workload, closed_loop, draw_jobs
from faser_trtllm.profiling.prompts import PromptSet

TEMPERATURE, SAMPLED_SHARE = 0.8, 0.5
MIN_JOBS = 8
WORDS = (
    "Half of the requests are greedy, half sampled with a seed at temperature "
    f"{TEMPERATURE:g}; {JOBS_PER_STREAM} or more per stream."
)


def measured_load(
    bench: Bench, prompts: PromptSet, concurrency: int, seed: int, longest: int | None = None
) -> Workload:
    """Return requests with outputs of a third of `longest` to `longest` tokens (default: the options' max_tokens)."""
    longest = longest or max_tokens(bench)
    num_jobs = max(MIN_JOBS, JOBS_PER_STREAM * concurrency)
    return _load(bench, prompts, concurrency, num_jobs, longest, seed)


def warm_up_load(bench: Bench, prompts: PromptSet, concurrency: int) -> Workload:
    """Return one request per stream with half the tokens, for a warm-up that is not measured."""
    return _load(bench, prompts, concurrency, concurrency, max(2, max_tokens(bench) // 2), -1)


def _load(bench: Bench, prompts: PromptSet, concurrency: int, num_jobs: int, longest: int, seed: int) -> Workload:
    jobs = draw_jobs(
        prompts.token_ids,
        num_jobs,
        min_tokens=max(1, longest // 3),
        max_tokens=longest,
        temperature=TEMPERATURE,
        sampled_share=SAMPLED_SHARE,
        seed=bench.options.seed + 1000 * (1 + seed) + concurrency,
    )
    return closed_loop(jobs, concurrency)
