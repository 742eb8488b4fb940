"""Options of `faser plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from faser_trtllm.errors import InvalidArgumentError
from lab.costmodel.gpu import Gpu
from lab.costmodel.shape import ModelShape, find_shape
from lab.costmodel.table import ExitSignal
from lab.planner.load.acceptance import Acceptance
from lab.planner.load.arrivals import TRACES, Arrival, Lengths, generated_arrivals, read_arrivals

TRACE_S = 600.0  # duration of a generated trace
MAX_PROMPT, MAX_OUTPUT = 8192, 2048  # tokens; longer requests are cut
MAX_PADDING = 1024  # largest difference between padded vocabularies of one tokenizer


@dataclass(frozen=True)
class Load:
    """A load. concurrency: requests running at a time; None: requests come from arrivals()."""

    name: str
    concurrency: int | None
    arrivals: Callable[[], Iterator[Arrival]] = lambda: iter(())


@dataclass(frozen=True)
class PlanOptions:
    """Options of `faser plan`. requests: lengths of requests in closed loops. max_requests: limit of one run.

    head_acceptance: acceptance of "eagle3" and "block", if it is not the draft model's. systems: labels of systems.py.
    exit_signal: quality of an early exit, for pruning.
    """

    gpu: Gpu
    target: ModelShape
    draft: ModelShape
    acceptance: Acceptance
    loads: tuple[Load, ...]
    requests: Lengths
    systems: tuple[str, ...]
    exit_signal: ExitSignal = field(default_factory=ExitSignal)
    head_acceptance: Mapping[str, Acceptance] = field(default_factory=dict)
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    table: Path | None = None
    max_requests: int = 2000
    max_num_tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidArgumentError(f"{name} is {value}; it must be more than 0")
        if self.max_requests < 1:
            raise InvalidArgumentError(f"max_requests is {self.max_requests}; it must be at least 1")
        vocab_sizes = self.target.vocab_size, self.draft.vocab_size
        if not self.draft.is_head and abs(vocab_sizes[0] - vocab_sizes[1]) > MAX_PADDING:
            raise InvalidArgumentError(
                f"draft is {self.draft.name} with a vocabulary of {vocab_sizes[1]} tokens, {self.target.name} has "
                f"{vocab_sizes[0]}, and they cannot speculate together; take a draft of the target's family"
            )
        largest = max(load.concurrency or 1 for load in self.loads)
        if self.max_num_tokens < largest:
            raise InvalidArgumentError(
                f"max_num_tokens is {self.max_num_tokens}; it must be at least the largest load, {largest}, one "
                "row each"
            )


def parse_loads(text: str, seed: int) -> tuple[Load, ...]:
    """Parse numbers, CSV files and "azure:5" (a trace's name and requests per second), separated by commas."""
    return tuple(_parse_load(part.strip(), seed) for part in text.split(",") if part.strip()) or _no_load(text)


def _parse_load(text: str, seed: int) -> Load:
    if text.isdecimal():
        if not 1 <= int(text) <= 4096:
            raise InvalidArgumentError(f"load is {text} requests in flight; it must be from 1 to 4096")
        return Load(f"{int(text)} in flight", int(text))
    name, colon, rate = text.partition(":")
    if colon and name in TRACES:
        try:
            mean_rate = float(rate)
        except ValueError:
            mean_rate = 0.0
        if not 0.0 < mean_rate < 1e4:
            raise InvalidArgumentError(
                f"load is {text!r}; the part after the colon must be the requests per second, above 0 and below 10000; "
                f"write it like {name}:5"
            )
        lengths = TRACES[name]

        def generate() -> Iterator[Arrival]:
            return generated_arrivals(lengths, mean_rate, TRACE_S, seed, max_prompt=MAX_PROMPT, max_output=MAX_OUTPUT)

        return Load(f"{name} at {mean_rate:g} requests/s", None, generate)
    path = Path(text)
    if not path.is_file():
        raise InvalidArgumentError(
            f"load is {text!r}, which is no number of requests in flight, no CSV file, and none of "
            f"{', '.join(f'{trace}:RATE' for trace in TRACES)}"
        )
    next(read_arrivals(path), None)  # refuse an unreadable file now
    return Load(path.name, None, lambda: read_arrivals(path, MAX_PROMPT, MAX_OUTPUT))


def _no_load(text: str) -> tuple[Load, ...]:
    raise InvalidArgumentError(f"load is {text!r}, give at least one, as in 8,64")


def parse_requests(text: str) -> Lengths:
    """Parse a trace's name such as "sharegpt", or "1024,512" (tokens of every prompt and output)."""
    if text in TRACES:
        return TRACES[text]
    prompt, _, output = text.partition(",")
    if prompt.isdecimal() and output.isdecimal() and 0 < int(prompt) <= MAX_PROMPT and 0 < int(output) <= MAX_OUTPUT:
        return Lengths(int(prompt), 0.0, int(output), 0.0)
    raise InvalidArgumentError(
        f"requests is {text!r}; it must be one of {', '.join(TRACES)} or PROMPT,OUTPUT in tokens, at most "
        f"{MAX_PROMPT},{MAX_OUTPUT}"
    )


def parse_acceptance(text: str) -> Acceptance:
    """Parse a number, a JSON file, or the name of a published curve."""
    try:
        mean = float(text)
    except ValueError:
        path = Path(text)
        return Acceptance.load(path) if path.suffix == ".json" or path.is_file() else Acceptance.published(text)
    return Acceptance.of(mean)


def parse_exit_signal(text: str) -> ExitSignal:
    """Parse "0.8,0.05": the shares of drafts to be rejected, and of others, that an early exit doubts."""
    try:
        recall, false = map(float, text.split(","))
    except ValueError:
        recall = false = -1.0
    if not 0.0 < false < recall < 1.0:
        raise InvalidArgumentError(
            f"exit_signal is {text!r}; it must be two numbers between 0 and 1: the share of drafts to be rejected "
            "that an early exit doubts, and a smaller share of the other drafts that it doubts; write it like 0.4,0.03"
        )
    return ExitSignal(recall=recall, false=false)


def find_draft(name: str, target: ModelShape) -> ModelShape:
    """Return a draft model of find_shape(), or for "eagle3" or "block" the target's head or block drafter."""
    if name in ("eagle3", "block"):
        return target.eagle3() if name == "eagle3" else target.block_drafter()
    return find_shape(name)


def draw_lengths(options: PlanOptions) -> Iterator[tuple[int, int]]:
    """Yield prompt and output tokens of a closed loop's requests."""
    return options.requests.draw(np.random.default_rng(options.seed), MAX_PROMPT, MAX_OUTPUT)
