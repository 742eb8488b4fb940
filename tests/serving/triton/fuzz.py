"""The inputs that fuzz tests send, how long the tests go on, and the properties that every answer must have."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from faser_trtllm.serving.client import INPUT_DTYPES
from tests.support.effort import pick

NUM_FUZZ_TESTS = 4
DEFAULT_SECONDS = pick(2.0, 60.0)
BATCH = 20
MIN_BATCHES = 5  # inputs enough to be of every kind, however slow the machine

NOT_FUZZED = ("stop", "guided_decoding_guide_type", "guided_decoding_guide")
"""Inputs that mean nothing without others."""

DTYPES = {name: dtype for name, dtype in INPUT_DTYPES.items() if name not in NOT_FUZZED} | {"length_penalty": "FP32"}
"""Every other input of the model `faser` and Triton's type of it."""

texts = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["hello", "", " ", "\x00", "\ud800", "\ufeff", "<|endoftext|>", "😀" * 300, "a" * 5000]),
)
integers = st.one_of(
    st.integers(1, 24),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 0, 2**31 - 1, 2**31, -(2**31), 2**32 + 1, 2**63, 2**64, 99999999999]),
)
floats = st.one_of(
    st.floats(0.01, 2.0),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -1.0, 1e60, -1e60, 1e-300, 1e308]),
)
VALUES = {"BYTES": texts, "INT32": integers, "UINT64": integers, "FP32": floats, "BOOL": st.booleans()}
anything: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), integers, floats, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)


def _field(name: str, value: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, Any]]:
    return st.tuples(st.just(name), st.one_of(value, value, value, st.lists(value, max_size=5), anything))


json_fields = st.lists(
    st.one_of(
        *(_field(name, VALUES[dtype]) for name, dtype in DTYPES.items()),
        st.tuples(st.text(st.characters(exclude_characters="\r\n/"), max_size=12), anything),  # Triton repeats them
    ),
    max_size=6,
)
"""Fields of a body of generate: most of the right kind, some of any kind, some that do not exist."""


def fuzz(test: Callable[..., None], *strategies: st.SearchStrategy[Any]) -> int:
    """Run the test on drawn input for this test's share of FASER_FUZZ_SECONDS; how many inputs it had.

    FASER_FUZZ_SECONDS is 4 unless given, and 60 when everything runs. FASER_FUZZ_SEED (default 0) begins the seeds, so
    that a run in CI repeats itself as far as time allows. A failure is not shrunk: this is for
    finding.
    """
    total_s = float(os.environ.get("FASER_FUZZ_SECONDS", DEFAULT_SECONDS))
    first = int(os.environ.get("FASER_FUZZ_SEED", "0"))
    deadline_s = time.monotonic() + total_s / NUM_FUZZ_TESTS
    num_inputs = number = 0

    def counted(drawn: tuple[Any, ...]) -> None:
        nonlocal num_inputs
        num_inputs += 1
        test(*drawn)

    while number < MIN_BATCHES or time.monotonic() < deadline_s:
        run = settings(
            max_examples=BATCH,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )(given(st.tuples(*strategies))(counted))
        seed(first + number)(run)()
        number += 1
    return num_inputs


_PATH = re.compile(r"(?<![\w<])/(?:[\w.+-]+/)+[\w.+-]*|\.py\b|Traceback", re.ASCII)


def check_message(message: str, secrets: list[str]) -> None:
    """One sentence, without a path of the machine or one of the secrets."""
    assert message.strip(), "an error without a message"
    assert "\n" not in message, message
    assert len(message) < 2000, message[:2000]
    for secret in secrets:
        assert secret not in message, message
    found = _PATH.search(message)
    assert found is None, f"{found and found[0]!r} in: {message}"
