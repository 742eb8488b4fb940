"""Runs that cannot work are refused before anything starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.options import BenchOptions
from faser_trtllm.errors import InvalidArgumentError

OPTIONS = BenchOptions(Path("target"), Path("draft"), Path("out"))


def test_defaults_are_valid_and_quick_stays_so() -> None:
    OPTIONS.validate()
    quick = OPTIONS.quick()
    quick.validate()
    assert quick.rounds < OPTIONS.rounds
    assert quick.speculation[0] == "off"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculation": ("fixed:2",)}, "must start with off"),
        ({"speculation": ()}, "speculation is empty"),
        ({"batch_sizes": (3,)}, "num_prompts is 8, it must be a multiple of batch size 3"),
        ({"batch_sizes": (0,)}, "batch_sizes is 0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"peers": ("vllm",)}, "peer vllm is unknown"),
        ({"llamacpp_dtypes": ("q4_0",)}, "llamacpp_dtypes holds q4_0"),
        ({"cores": (100_000,)}, "core 100000 is not one"),
    ],
)
def test_refusals(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        replace(OPTIONS, **change).validate()  # type: ignore[arg-type]
