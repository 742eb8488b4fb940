"""The requests of a soak: valid ones with the expected text, and invalid ones with the expected error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.bystander.cases import Case
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.profiling.prompts import draw_prompts
from faser_trtllm.serving.text.offline import generate_all

NUM_PROMPTS = 24
MAX_PROMPT_LEN = 96
OUTPUTS = ((8, 0.0), (48, 0.0), (96, 0.0), (48, 0.9))  # max_tokens, temperature
WORST, UNARY = "hostile", "unary, hung up"
HOSTILE = (WORST, UNARY)
_SEED = 11  # makes the text of sampled jobs reproducible


@dataclass(frozen=True)
class Job:
    """A valid request. fields: model inputs; text, finish_reason: the expected result."""

    fields: Mapping[str, Any]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class BadInput:
    """A request that must be refused as INVALID_ARGUMENT with this text in the message."""

    fields: Mapping[str, Any]
    message: str


@dataclass(frozen=True)
class Cancellation:
    """A cancellation this long after sending a request, or after this many responses."""

    after_s: float | None = None
    after_responses: int | None = None


@dataclass(frozen=True)
class Plan:
    """One request of the load. kind: its purpose, HOSTILE for those of hostile.py."""

    request: Job | BadInput | Case
    fields: Mapping[str, Any] = field(default_factory=dict)
    cancellation: Cancellation | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        if not self.kind:
            object.__setattr__(self, "kind", self._usual_kind())

    @property
    def has_deadline(self) -> bool:
        return "timeout_ms" in self.fields

    @property
    def is_hostile(self) -> bool:
        return self.kind in HOSTILE

    def _usual_kind(self) -> str:
        if isinstance(self.request, BadInput):
            return "bad input"
        if self.has_deadline:
            return "with a deadline"
        return "to finish" if self.cancellation is None else "to cancel"


class Planner:
    """A generator of one worker's requests."""

    def __init__(
        self,
        jobs: tuple[Job, ...],
        bad_inputs: tuple[BadInput, ...],
        *,
        cancel_share: float,
        bad_share: float,
        late_share: float,
        seed: int,
    ) -> None:
        self._jobs = jobs
        self._bad_inputs = bad_inputs
        self._cancel_share = cancel_share
        self._bad_share = bad_share
        self._late_share = late_share
        self._random = Random(seed)

    def next(self, usual_s: float) -> Plan:
        """Draw a request. usual_s: current duration of a request, within which it is cancelled or times out."""
        random = self._random
        stream = random.random() < 0.9
        draw = random.random()
        if draw < self._bad_share:
            bad = random.choice(self._bad_inputs)
            return Plan(bad, {"stream": True, **bad.fields})
        job = random.choice(self._jobs)
        fields = {**job.fields, "stream": stream, "exclude_input_in_output": True}
        if draw < self._bad_share + self._cancel_share:
            return Plan(job, fields, self._cancellation(usual_s))
        if draw < self._bad_share + self._cancel_share + self._late_share:
            return Plan(job, {**fields, "timeout_ms": 1e3 * random.uniform(0.001, max(0.002, usual_s))})
        return Plan(job, fields)

    def _cancellation(self, usual_s: float) -> Cancellation:
        """Draw a cancellation: at once (in the queue or the prefill), at any time, or within the stream."""
        random = self._random
        way = random.randrange(3)
        if way == 0:
            return Cancellation(after_s=random.uniform(0.001, 0.02))
        if way == 1:
            return Cancellation(after_s=random.uniform(0.001, max(0.002, usual_s)))
        return Cancellation(after_responses=random.randint(1, 8))


def make_jobs(engine_dir: Path, seed: int) -> tuple[Job, ...]:
    """Return prompts of several lengths, greedy and seeded, with the target's text, generated in this process."""
    engines = EngineDir.load(engine_dir)
    tokenizer = Tokenizer.load(engines.tokenizer_dir)
    max_seq_len = engines.build_config.max_seq_len
    prompt_len = max(1, min(MAX_PROMPT_LEN, max_seq_len // 4))
    prompts = draw_prompts(tokenizer.encode, NUM_PROMPTS, prompt_len, seed).token_ids
    texts = [tokenizer.decode(ids[: prompt_len * (1 + i % 4) // 4]) for i, ids in enumerate(prompts)]
    jobs: list[Job] = []
    for max_tokens, temperature in OUTPUTS:
        inputs: dict[str, Any] = {"max_tokens": min(max_tokens, max_seq_len // 2), "temperature": temperature}
        if temperature:
            inputs["seed"] = _SEED
        with open_executor(engine_dir, ExecutorConfig(speculation="off")) as executor:
            answers = tuple(generate_all(executor, engine_dir, texts, inputs | {"end_ids": ()}))
        jobs += [
            Job({"text_input": text, "end_id": -1, **inputs}, answer.text, answer.finish_reason)
            for text, answer in zip(texts, answers, strict=True)
        ]
    return tuple(jobs)


def make_bad_inputs(vocab_size: int, max_seq_len: int) -> tuple[BadInput, ...]:
    """Return invalid requests, with the part of our message that names the problem."""
    text = {"text_input": "a"}
    table: tuple[tuple[dict[str, Any], str], ...] = (
        ({"max_tokens": 5}, "the prompt is missing"),
        ({"text_input": ""}, "the prompt is empty"),
        ({"text_input": "a", "input_ids": [1]}, "send one of them"),
        ({"input_ids": [-1]}, "token id -1"),
        ({"input_ids": [vocab_size]}, f"token id {vocab_size}"),
        ({"input_ids": [1] * max_seq_len}, f"the prompt has {max_seq_len} tokens"),
        (text | {"max_tokens": 0}, "max_tokens is 0"),
        (text | {"max_tokens": -1}, "max_tokens is -1"),
        (text | {"temperature": -1.0}, "temperature is -1.0"),
        (text | {"top_p": 0.0}, "top_p is 0.0"),
        (text | {"top_k": -1}, "top_k is -1"),
        (text | {"min_p": 1.5}, "min_p is 1.5"),
        (text | {"num_draft_tokens": -1}, "num_draft_tokens is -1"),
        (text | {"beam_width": 2}, "not supported with speculation"),
        (text | {"num_return_sequences": 300}, "num_return_sequences is 300"),
        (text | {"stop_words": ["x"] * 65}, "allowed are at most 64"),
        (text | {"end_id": vocab_size}, f"token id {vocab_size}"),
        (text | {"priority": 7.0}, "priority is 7.0"),
        (text | {"timeout_ms": -1.0}, "timeout_ms is -1.0"),
    )
    return tuple(BadInput(fields, message) for fields, message in table)
