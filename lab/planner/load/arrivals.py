"""Arrivals of requests from a seeded generator with the statistics of public traces, or from a trace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from faser_trtllm.errors import InvalidArgumentError
from lab.planner.load.trace import OUTPUTS, PROMPTS, missing_column, read_trace

SWING = 35.0  # highest over lowest rate of a day (FASER, arXiv 2604.20503, of Azure's trace)
BURST_S = 10.0  # duration of a constant rate
BURSTINESS = 0.5  # coefficient of variation of the rate between such stretches, a gamma variable (BurstGPT's model)
AHEAD = 1024  # lengths are drawn in blocks of this size


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request with its time, in seconds from the start, and its tokens."""

    at_s: float
    prompt_len: int
    output_len: int


@dataclass(frozen=True)
class Lengths:
    """Log-normal numbers of tokens: medians, standard deviations of logarithms, and the logarithms' correlation."""

    prompt_median: float
    prompt_sigma: float
    output_median: float
    output_sigma: float
    correlation: float = 0.0

    @property
    def prompt_mean(self) -> float:
        return self.prompt_median * math.exp(self.prompt_sigma**2 / 2)

    @property
    def output_mean(self) -> float:
        return self.output_median * math.exp(self.output_sigma**2 / 2)

    def draw(self, rng: np.random.Generator, max_prompt: int, max_output: int) -> Iterator[tuple[int, int]]:
        """Yield prompt and output lengths without end, cut to the limits."""
        while True:
            first, second = rng.standard_normal((2, AHEAD))
            second = self.correlation * first + math.sqrt(1.0 - self.correlation**2) * second
            prompts = np.exp(math.log(self.prompt_median) + self.prompt_sigma * first)
            outputs = np.exp(math.log(self.output_median) + self.output_sigma * second)
            prompts = np.clip(np.round(prompts), 1, max_prompt).astype(int)
            outputs = np.clip(np.round(outputs), 1, max_output).astype(int)
            yield from zip(prompts.tolist(), outputs.tolist(), strict=True)


TRACES = {
    # Medians of Azure's traces of 2023 from the Splitwise paper (arXiv 2311.18677), deviations from its means.
    "azure": Lengths(1020, 0.5, 129, 1.0),
    "azure-code": Lengths(1500, 0.8, 13, 1.2),
    # From the first conversations of BurstGPT (arXiv 2401.17644).
    "burstgpt": Lengths(600, 1.2, 340, 0.8),
    # From SpecDecode-Bench's sample: means 355 and 740.
    "sharegpt": Lengths(215, 1.0, 580, 0.7),
}


def generated_arrivals(
    lengths: Lengths,
    mean_rate: float,
    duration_s: float,
    seed: int,
    *,
    max_prompt: int = 4096,
    max_output: int = 1024,
    swing: float = SWING,
) -> Iterator[Arrival]:
    """Yield a Poisson process whose rate (requests per second) follows a day.

    The rate goes from low to high and back within duration_s, by a factor of swing, times a gamma variable per BURST_S.
    """
    rng = np.random.default_rng(seed)
    tokens = lengths.draw(rng, max_prompt, max_output)
    lowest, highest = _rates(mean_rate, swing)
    shape = 1.0 / BURSTINESS**2
    start_s = 0.0
    while start_s < duration_s:
        middle = (start_s + min(start_s + BURST_S, duration_s)) / 2
        level = 0.5 - 0.5 * math.cos(2.0 * math.pi * middle / duration_s)
        rate = lowest * (highest / lowest) ** level * rng.gamma(shape, 1.0 / shape)
        stretch_s = min(BURST_S, duration_s - start_s)
        times = np.sort(rng.uniform(start_s, start_s + stretch_s, rng.poisson(rate * stretch_s)))
        for at_s in times.tolist():
            yield Arrival(at_s, *next(tokens))
        start_s += BURST_S


def read_arrivals(path: Path, max_prompt: int = 4096, max_output: int = 1024) -> Iterator[Arrival]:
    """Yield a trace's arrivals lazily; raise InvalidArgumentError, naming the line, if they are not sorted by time.

    Rows without output are left out; longer prompts and outputs are cut.
    """
    first_s: float | None = None
    last_s = 0.0
    for row in read_trace(path):
        for tokens, known in ((row.num_input_tokens, PROMPTS), (row.num_output_tokens, OUTPUTS)):
            if tokens is None:
                raise missing_column(path, known)
        first_s = row.at_s if first_s is None else first_s
        if row.at_s - first_s < last_s:
            raise InvalidArgumentError(f"{row.where} is earlier than the one before; sort the file by time")
        last_s = row.at_s - first_s
        if row.num_output_tokens:
            prompt_len = min(max(1, row.num_input_tokens or 0), max_prompt)
            yield Arrival(last_s, prompt_len, min(row.num_output_tokens, max_output))


def _rates(mean_rate: float, swing: float) -> tuple[float, float]:
    """Return the lowest and highest rate of a day with this mean, in which the rate's log follows a cosine."""
    level = 0.5 - 0.5 * np.cos(2.0 * np.pi * (np.arange(1000) + 0.5) / 1000)
    lowest = mean_rate / float(np.mean(swing**level))
    return lowest, lowest * swing
