"""Timed requests of several clients, drawn at random, and what may become of each of them.

Speculative decoding must not change text, and no request may change another's: so each text is what its request gets
alone, bit for bit, or a beginning of it where its client or its deadline ended it.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from benchmarks.bystander.worst import worst_of
from faser_trtllm.serving.triton.contract import INPUTS

READ, STOP, HANG_UP = "read", "stop", "hang up"
WITHOUT_EFFECT = (
    "stream",
    "priority",
    "cache_salt",
    "num_draft_tokens",
    "timeout_ms",
    "return_log_probs",
    "return_context_log_probs",
    "num_top_log_probs",
    "return_is_draft",
    "return_acceptance",
    "prediction",
    "return_perf_metrics",
    "drafters",
)
"""Inputs that must not change text."""

NOT_ODD = ("stop", "drafters", "text_input", "max_tokens", "min_tokens", "guided_decoding_guide", "end_id")
"""Not taken at their limits: drawn otherwise, or with an outcome that the reference cannot tell."""

MAX_REQUESTS = 14
SPAN_MS = 150.0
_OPENINGS = ("def add(first, ", "The quick brown fox", "for index in", "a b a b a b a b", "Zwölf 🙂")


@dataclass(frozen=True, repr=False)
class Ask:
    """One request. at_ms: when it is sent. end: how its client ends it, after_ms after it was sent.

    door: "http" or "grpc"; client: requests of one client share a connection where the door has them.
    """

    at_ms: float
    fields: Mapping[str, Any]
    end: str = READ
    after_ms: float = 0.0
    door: str = "grpc"
    client: int = 0

    @property
    def alone(self) -> dict[str, Any]:
        """The inputs that its text depends on, for a request that is read to its end."""
        kept = {name: value for name, value in self.fields.items() if name not in WITHOUT_EFFECT}
        return {**kept, "exclude_input_in_output": True}

    @property
    def key(self) -> str:
        return json.dumps(self.alone, sort_keys=True)

    def __repr__(self) -> str:
        fields = {
            name: value if len(repr(value)) < 120 else f"{repr(value)[:120]} ..." for name, value in self.fields.items()
        }
        return f"Ask({self.at_ms:.1f}, {fields}, {self.end!r}, {self.after_ms:.1f}, {self.door!r}, {self.client})"

    def plain(self) -> Ask:
        """Return a request of the same length without other fields, whose client reads it to its end."""
        kept = ("text_input", "max_tokens", "stream", "num_return_sequences", "exclude_input_in_output")
        fields = {name: value for name, value in self.fields.items() if name in kept}
        return replace(self, fields={**fields, "end_id": -1}, end=READ)


Trace = tuple[Ask, ...]


@dataclass
class Result:
    """The result that a client got. texts, reasons: by sequence. error: the sentence that ended the request."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    error: str | None = None
    is_ended: bool = False

    def add(self, sequence: int, text: str, reason: str | None) -> None:
        self.texts[sequence] = self.texts.get(sequence, "") + text
        if reason is not None:
            self.reasons[sequence] = reason


def judge(ask: Ask, result: Result, alone: Result) -> str | None:
    """Return a description of what is wrong, or None. A stop or a hang-up may come too late."""
    if not result.is_ended:
        return "it did not end"
    if alone.error is not None:
        # A client that left, or a stop before the refusal, sees no error.
        is_well = result.error is not None or ask.end == HANG_UP
        return None if is_well else f"it was served, alone it gets {alone.error!r}"
    for sequence, text in result.texts.items():
        whole = alone.texts[sequence]
        reason = result.reasons.get(sequence)
        if reason in ("stop", "length"):
            if (text, reason) != (whole, alone.reasons[sequence]):
                return f"sequence {sequence} is {text!r} ({reason}), alone {whole!r} ({alone.reasons[sequence]})"
        elif not whole.startswith(text.rstrip("\ufffd")):
            return f"sequence {sequence} begins {text!r}, alone it is {whole!r}"
        elif reason is not None and not _may_end(ask, reason):
            return f"sequence {sequence} ended with {reason!r}"
    if result.error is not None:
        return None if _may_fail(ask, result.error) else f"it failed with {result.error!r}"
    if ask.end != HANG_UP and result.reasons.keys() != alone.reasons.keys():
        return f"sequences {sorted(result.reasons)} ended, alone {sorted(alone.reasons)} do"
    return None


def _may_end(ask: Ask, reason: str) -> bool:
    return (reason == "cancelled" and ask.end != READ) or (reason == "timeout" and "timeout_ms" in ask.fields)


def _may_fail(ask: Ask, error: str) -> bool:
    return ("cancelled" in error and ask.end != READ) or ("timed out" in error and "timeout_ms" in ask.fields)


def draw_trace(seed: int) -> Trace:
    """The same trace for a seed."""
    random = Random(seed)
    number = random.randint(2, MAX_REQUESTS)
    is_burst = random.random() < 0.4
    times = sorted(random.choice((0.0, 20.0)) if is_burst else random.uniform(0, SPAN_MS) for _ in range(number))
    return tuple(_draw_ask(random, at_ms) for at_ms in times)


def _draw_ask(random: Random, at_ms: float) -> Ask:
    fields: dict[str, Any] = {"text_input": _prompt(random), "max_tokens": random.choice((1, 5, 20, 60))}
    for share, draw in _PARTS:
        if random.random() < share:
            fields |= draw(random)
    if fields.keys() & {"temperature", "top_k", "top_p", "min_p"}:
        fields.setdefault("seed", 1)  # text without a seed is nobody's to foretell
    fields["stream"] = random.random() < 0.8
    fields["exclude_input_in_output"] = True
    end = random.choice((READ,) * 6 + (STOP, HANG_UP))
    return Ask(
        at_ms, fields, end, random.uniform(0, SPAN_MS), random.choice(("grpc", "grpc", "http")), random.randrange(4)
    )


def _prompt(random: Random) -> str:
    """Openings that requests share, and endings that few do."""
    return random.choice(_OPENINGS) * random.choice((1, 1, 2)) + "".join(random.choices("ab \n", k=random.randrange(6)))


def _odd(random: Random) -> dict[str, Any]:
    name = random.choice([name for name in INPUTS if name not in NOT_ODD])
    worst = worst_of(name)
    beyond = () if name in WITHOUT_EFFECT else worst.beyond
    found = dict(random.choice([*worst.limits, *worst.limits, *beyond]))
    if found.get("num_return_sequences", 0) > 8:
        found["max_tokens"] = 5
    return found


_PARTS: Sequence[tuple[float, Callable[[Random], dict[str, Any]]]] = (
    (0.4, lambda r: {"temperature": r.choice((0.7, 1.5)), "seed": r.randrange(4)}),
    (0.2, lambda r: {"repetition_penalty": 1.3, "frequency_penalty": 0.5}),
    (0.2, lambda r: {"num_return_sequences": r.choice((2, 3, 8))}),
    (0.3, lambda r: {"stop_words": ["".join(r.choices(string.ascii_lowercase + " ", k=r.choice((1, 2))))]}),
    (0.15, lambda r: {"bad_words": ["e", "the"]}),
    (0.15, lambda r: {"logit_bias_ids": [r.randrange(300)], "logit_bias_values": [r.choice((-5.0, 8.0))]}),
    (
        0.15,
        lambda r: {"guided_decoding_guide_type": "regex", "guided_decoding_guide": r.choice(("[ab]{3,9}", "[^x]+"))},
    ),
    (0.1, lambda r: {"end_id": -1}),
    (0.1, lambda r: {"min_tokens": 1}),
    (0.3, lambda r: {"priority": r.choice((0.0, 0.5, 1.0))}),
    (0.3, lambda r: {"cache_salt": r.choice("AB")}),
    (0.3, lambda r: {"num_draft_tokens": r.choice((0, 1, 8))}),
    (0.15, lambda r: {"timeout_ms": r.choice((1.0, 15.0, 60.0))}),
    (0.2, lambda r: {"return_log_probs": True, "num_top_log_probs": r.choice((0, 3))}),
    (0.1, lambda r: {"return_context_log_probs": True}),
    (0.1, lambda r: {"return_is_draft": True, "return_perf_metrics": True}),
    (0.1, _odd),
)


def shrink(trace: Trace, fails: Callable[[Trace], bool], max_runs: int = 60) -> Trace:
    """Fewer requests that still fail, by leaving out halves, quarters and so on."""
    size = max(1, len(trace) // 2)
    while max_runs > 0:
        for begin in range(0, len(trace), size):
            shorter = trace[:begin] + trace[begin + size :]
            max_runs -= 1
            if shorter and fails(shorter):
                trace = shorter
                break
        else:
            if size == 1:
                return trace
            size //= 2
    return trace
