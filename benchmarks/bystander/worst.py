"""The worst values of each input of the model `faser`: at its limits, just beyond them, and of the largest body.

Limits of numbers and switches come from the table of request fields, those of texts and lists from WRITTEN. An input
that is missing there is a KeyError, which tests/benchmarks/bystander finds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from faser_trtllm.config import ServiceConfig
from faser_trtllm.core.request_field import MAX_INT32, Row, rows
from faser_trtllm.core.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_SALT_CHARS,
    MAX_TOP_LOG_PROBS,
)
from faser_trtllm.guided.spec import MAX_GUIDE_BYTES
from faser_trtllm.serving.text.request import (
    DAY_MS,
    MAX_BAD_TEXTS,
    MAX_DRAFTERS_CHARS,
    MAX_PREDICTION_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_WORDS,
    MAX_WORD_CHARS,
    MAX_WORDS,
    MAX_WORDS_CHARS,
    TextRequest,
)
from faser_trtllm.serving.triton.contract import INPUTS
from faser_trtllm.serving.triton.request import MAX_RETURN_SEQUENCES

MAX_PRIORITY = ServiceConfig().max_priority
MAX_BODY_BYTES = 4 << 20  # the limit in deploy/nginx.conf

Fields = Mapping[str, Any]

_LETTERS = b"abcdefghijklmnopqrstuvwxyz_()=. " * 8
"""A character for each byte: megabytes of them take no time where this module is imported."""


@dataclass(frozen=True)
class Worst:
    """The worst values of one input, each with the inputs that it needs.

    limits: values that are served. beyond: values just beyond a limit. large: bodies of MAX_BODY_BYTES.
    """

    limits: Sequence[Fields] = ()
    beyond: Sequence[Fields] = ()
    large: Sequence[Fields] = ()


def words(number: int, num_chars: int) -> list[str]:
    """Return different words whose letters tokenize badly."""
    random = Random(number * 1009 + num_chars)
    return [random.randbytes(num_chars).translate(_LETTERS).decode() for _ in range(number)]


def text(num_chars: int) -> str:
    return words(1, num_chars)[0]


def _word_lists(name: str, number: int, num_chars: int, weights: str = "") -> Worst:
    """Return at most `number` words with num_chars characters together."""

    def fields(found: list[str]) -> Fields:
        return {name: found} | ({weights: [0.1] * len(found)} if weights else {})

    many, long = (number, num_chars // number), (max(1, num_chars // MAX_WORD_CHARS), min(num_chars, MAX_WORD_CHARS))
    return Worst(
        limits=[fields(words(*many)), fields(words(*long))],
        beyond=[
            fields(words(number + 1, 1)),
            fields(words(1, MAX_WORD_CHARS + 1)),
            fields(words(number, MAX_WORDS_CHARS // number + 1)),
            fields(words(8 * number, MAX_WORD_CHARS)[: 2 << 10]),
        ],
        large=[fields(words((MAX_BODY_BYTES >> 10) - 100, MAX_WORD_CHARS - 8)), fields(["x"] * (MAX_BODY_BYTES // 6))],
    )


def _schema(**schema: Any) -> Fields:
    return {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(schema)}


def _regex(pattern: str) -> Fields:
    return {"guided_decoding_guide_type": "regex", "guided_decoding_guide": pattern}


def _guides() -> Worst:

    def properties(number: int) -> Any:
        return {f"p{place}": {"type": "integer", "minimum": 12345} for place in range(number)}

    def grammar(number: int) -> Fields:
        text = "start: " + " ".join(["a?"] * number) + "\na: /[a-z]+[0-9]{1,50}/"
        return {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": text}

    ends = [{"type": "string", "pattern": f"^.*{chr(97 + i % 26)}.{{{i + 5}}}$"} for i in range(30)]
    return Worst(
        limits=[
            _schema(type="object", properties=properties(100)),
            _schema(type="array", items={"type": "string", "maxLength": 2000}, maxItems=1000),
            _regex("(a|b)*a(a|b){200}"),
            _regex("(\\p{L}{1,30}\\p{N}{1,30}){1,200}"),
            _regex("|".join(words(1500, 32)).translate(str.maketrans("", "", "().")).replace("|", "[a-z]*|")),
            grammar(100),
        ],
        beyond=[
            _regex("a" * (MAX_GUIDE_BYTES + 1)),
            _schema(type="integer", multipleOf=400009),
            _schema(type="object", properties=properties(700)),
            _schema(allOf=ends),
            _regex("(" * 5000),
            grammar(3000),
        ],
        large=[_regex("(a|b)" * (MAX_BODY_BYTES // 6))],
    )


WRITTEN: Mapping[str, Worst] = {
    "text_input": Worst(
        limits=[{"text_input": "def f(x): " * 80}, {"text_input": "\U0001f642" * 200}],
        beyond=[{"text_input": text(100_000)}, {"text_input": ""}, {"text_input": " " * 100_001}],
        large=[{"text_input": text(MAX_BODY_BYTES - 4096)}, {"text_input": "a" * (MAX_BODY_BYTES - 4096)}],
    ),
    "input_ids": Worst(
        limits=[{"input_ids": [7] * 900}],
        beyond=[{"input_ids": [7] * 20_000}, {"input_ids": [-1]}],
        large=[{"input_ids": [7] * (MAX_BODY_BYTES // 4)}],
    ),
    "end_id": Worst(limits=[{"end_id": -1}], beyond=[{"end_id": MAX_INT32}]),
    "embedding_bias_weights": Worst(
        limits=[{"embedding_bias_words": words(MAX_WORDS, 8), "embedding_bias_weights": [-100.0] * MAX_WORDS}],
        beyond=[{"embedding_bias_words": ["x"], "embedding_bias_weights": [1.0, 1.0]}],
        large=[{"embedding_bias_words": ["x"], "embedding_bias_weights": [0.5] * (MAX_BODY_BYTES // 4 - 1024)}],
    ),
    "allowed_token_ids": Worst(
        limits=[{"allowed_token_ids": [7]}, {"allowed_token_ids": [3, 5] * (MAX_ALLOWED_TOKENS // 2)}],
        beyond=[{"allowed_token_ids": [3] * (MAX_ALLOWED_TOKENS + 1)}, {"allowed_token_ids": [-1]}],
        large=[{"allowed_token_ids": [3] * (MAX_BODY_BYTES // 4)}],
    ),
    "logit_bias_ids": Worst(
        limits=[{"logit_bias_ids": list(range(MAX_LOGIT_BIAS)), "logit_bias_values": [0.5] * MAX_LOGIT_BIAS}],
        beyond=[{"logit_bias_ids": [1] * 5 * MAX_LOGIT_BIAS, "logit_bias_values": [-2.0]}, {"logit_bias_ids": [-1]}],
        large=[{"logit_bias_ids": [3] * (MAX_BODY_BYTES // 10), "logit_bias_values": [0.5] * (MAX_BODY_BYTES // 10)}],
    ),
    "logit_bias_values": Worst(
        limits=[{"logit_bias_ids": [5], "logit_bias_values": [-1e30]}],
        beyond=[{"logit_bias_ids": [5], "logit_bias_values": [1.0, 1.0]}],
        large=[{"logit_bias_values": [0.5] * (MAX_BODY_BYTES // 4 - 1024)}],
    ),
    "num_return_sequences": Worst(
        limits=[{"num_return_sequences": MAX_RETURN_SEQUENCES}],
        beyond=[{"num_return_sequences": MAX_RETURN_SEQUENCES + 1}, {"num_return_sequences": MAX_INT32}],
    ),
    "stop": Worst(beyond=[{"stop": True}]),  # stops a request by an id that others can guess
    "priority": Worst(
        limits=[{"priority": 0.0}, {"priority": MAX_PRIORITY}],
        beyond=[{"priority": 1.0}, {"priority": 1.001}, {"priority": -0.001}],
    ),
    "timeout_ms": Worst(limits=[{"timeout_ms": DAY_MS}], beyond=[{"timeout_ms": 0.0}, {"timeout_ms": 1e-9}]),
    "beam_width": Worst(limits=[{"beam_width": 1}], beyond=[{"beam_width": 2}]),
    "stream": Worst(limits=[{"stream": True}, {"stream": False}]),
    "min_tokens": Worst(
        limits=[{"min_tokens": 1}, {"min_tokens": MAX_INT32, "max_tokens": MAX_INT32}],
        beyond=[{"min_tokens": -1}, {"min_tokens": 33, "max_tokens": 32}],
    ),
    "cache_salt": Worst(
        limits=[{"cache_salt": "s" * MAX_SALT_CHARS}],
        beyond=[{"cache_salt": "s" * (MAX_SALT_CHARS + 1)}],
        large=[{"cache_salt": "s" * (MAX_BODY_BYTES - 4096)}],
    ),
    "drafters": Worst(
        limits=[{"drafters": "model"}, {"drafters": ",".join(["model"] * (MAX_DRAFTERS_CHARS // 6))}],
        beyond=[{"drafters": "x" * 5000}],
        large=[{"drafters": "model," * (MAX_BODY_BYTES // 6 - 1024)}],
    ),
    "prediction": Worst(
        limits=[{"prediction": "a" * MAX_PREDICTION_CHARS}, {"prediction": text(MAX_PREDICTION_CHARS)}],
        beyond=[{"prediction": text(MAX_PREDICTION_CHARS + 1)}],
        large=[{"prediction": text(MAX_BODY_BYTES - 4096)}],
    ),
    "stop_words": _word_lists("stop_words", MAX_STOP_WORDS, MAX_STOP_CHARS),
    "bad_words": _word_lists("bad_words", MAX_BAD_TEXTS, MAX_BAD_TOKENS // 2),  # a character is up to 0.8 tokens, twice
    "embedding_bias_words": _word_lists(
        "embedding_bias_words", MAX_WORDS, MAX_WORDS_CHARS, weights="embedding_bias_weights"
    ),
    "guided_decoding_guide": _guides(),
    "guided_decoding_guide_type": Worst(
        limits=[{"guided_decoding_guide_type": "json"}],
        beyond=[{"guided_decoding_guide_type": "x" * 5000}],
        large=[{"guided_decoding_guide_type": "x" * (MAX_BODY_BYTES - 4096)}],
    ),
    "num_top_log_probs": Worst(
        limits=[{"num_top_log_probs": MAX_TOP_LOG_PROBS, "return_log_probs": True, "return_context_log_probs": True}],
        beyond=[{"num_top_log_probs": MAX_TOP_LOG_PROBS + 1, "return_log_probs": True}, {"num_top_log_probs": 1}],
    ),
}
"""Worst values of inputs whose limits are not numbers in the table, or that need a second input."""


def worst_of(name: str) -> Worst:
    """Return the worst values of an input; KeyError if its limits are unknown."""
    if name in WRITTEN:
        return WRITTEN[name]
    if INPUTS[name] == "BOOL":
        return Worst(limits=[{name: True}])
    row = {row.name: row for row in rows(TextRequest)}.get(name)
    if row is None or row.bounds is None or row.is_list:
        raise KeyError(f"the worst values of {name} are not written down")
    return _of_number(row)


def _of_number(row: Row) -> Worst:
    bounds = row.bounds
    assert bounds is not None
    low, high = bounds.low, bounds.high
    if row.kind is int:
        beyond = [int(low) - 1] + ([int(high) + 1] if row.dtype == "UINT64" or high < MAX_INT32 else [])
        allowed = [number for number in beyond if row.dtype != "UINT64" or 0 <= number < 1 << 64]
        return Worst([{row.name: int(low)}, {row.name: int(high)}], [{row.name: number} for number in allowed])
    first, last = np.float32(low), np.float32(high)
    up, down = np.float32(math.inf), np.float32(-math.inf)
    inside = [np.nextafter(first, up) if bounds.above_low else first]
    inside.append(np.nextafter(last, down) if bounds.below_high else last)
    outside = [first if bounds.above_low else np.nextafter(first, down)]
    outside.append(last if bounds.below_high else np.nextafter(last, up))
    return Worst([{row.name: float(one)} for one in inside], [{row.name: float(one)} for one in outside])
