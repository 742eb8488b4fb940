"""The requests of a run: real prompts of given lengths, and the ones that the client cancels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from faser_trtllm.bench.serve.arrivals import Arrival
from faser_trtllm.profiling.prompts import draw_prompts


@dataclass(frozen=True)
class ServeJob:
    """One request. cancel_after: tokens received before the client cancels it; None: never."""

    prompt: tuple[int, ...]
    max_tokens: int
    arrival_s: float = 0.0
    cancel_after: int | None = None


@dataclass(frozen=True)
class Workload:
    """num_shortened: requests shortened to the engine's limits."""

    jobs: tuple[ServeJob, ...]
    prompt_source: str
    num_shortened: int = 0


def make_workload(
    encode: Callable[[str], list[int]],
    arrivals: Sequence[Arrival],
    *,
    prompt_len: int,
    max_tokens: int,
    max_seq_len: int,
    cancel_share: float = 0.0,
    seed: int = 0,
) -> Workload:
    """Prompts are windows of Python sources; prompt and output are cut to max_seq_len, output first."""
    wanted = [(a.num_input_tokens or prompt_len, a.num_output_tokens or max_tokens) for a in arrivals]
    lengths = [fit_lengths(num_input, num_output, max_seq_len) for num_input, num_output in wanted]
    longest = max(num_input for num_input, _ in lengths)
    prompts = draw_prompts(encode, len(arrivals), longest, seed)
    cancelled = cancel_points([num_output for _, num_output in lengths], cancel_share, seed)
    jobs = tuple(
        ServeJob(tokens[:num_input], num_output, arrival.arrival_s, cancel_after)
        for arrival, (num_input, num_output), tokens, cancel_after in zip(
            arrivals, lengths, prompts.token_ids, cancelled, strict=True
        )
    )
    num_shortened = sum(fitted != asked for fitted, asked in zip(lengths, wanted, strict=True))
    return Workload(jobs, prompts.source, num_shortened)


def fit_lengths(num_input: int, num_output: int, max_seq_len: int) -> tuple[int, int]:
    """Lengths that fit: the prompt leaves room for at least one output token, the output gets the rest."""
    num_input = min(num_input, max_seq_len - 1)
    return num_input, min(num_output, max_seq_len - num_input)


def cancel_points(num_output_tokens: Sequence[int], share: float, seed: int) -> list[int | None]:
    """For each request the number of tokens after which it is cancelled, or None; `share` of them, rounded."""
    rng = np.random.default_rng((seed, 1))
    num_requests = len(num_output_tokens)
    chosen = set(rng.permutation(num_requests)[: round(share * num_requests)].tolist())
    return [int(rng.integers(1, n + 1)) if i in chosen else None for i, n in enumerate(num_output_tokens)]
