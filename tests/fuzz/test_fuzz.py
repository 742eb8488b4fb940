"""Each fuzz target on its seeds, its kept corpus and some mutations of both; docs/verify.md has the long way.

The limit of CPU time is an oracle of fuzzing: an input that takes a second has found something.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from faser_trtllm.errors import FaserError
from tests.fuzz.mutation import mutated, neighbors
from tests.fuzz.target import CORPUS, MAX_CPU_S, FindingError, Target
from tests.fuzz.targets import TARGETS
from tests.support.effort import pick

NUM_MUTATIONS = pick(200, 5000)
NUM_NEIGHBORED = pick(2, 20)
MAX_CORPUS_BYTES = 1 << 20


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_only_documented_errors_and_within_limits(name: str) -> None:
    target = TARGETS[name]
    inputs = target.inputs()
    for data in inputs:
        target.check(data)
    rng = random.Random(0)
    for data in rng.sample(inputs, min(len(inputs), NUM_NEIGHBORED)):
        found = list(neighbors(target, data))
        for other in rng.sample(found, min(len(found), NUM_MUTATIONS // NUM_NEIGHBORED)):
            target.check(other)
    for _ in range(NUM_MUTATIONS):
        target.check(mutated(target, rng.choice(inputs), rng))


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_seeds_are_accepted_and_have_the_structure_that_is_mutated(name: str) -> None:
    """The parser accepts at least one seed, and still does after the codec has decoded and encoded it."""
    target = TARGETS[name]

    def is_accepted(data: bytes) -> bool:
        try:
            target.run(data)
        except target.errors:
            return False
        return True

    accepted = [data for data in target.seeds() if is_accepted(data)]
    assert accepted
    if target.codec is not None:
        again = [target.codec.encode(target.codec.decode(data)) for data in accepted if _has_structure(target, data)]
        assert again
        assert all(map(is_accepted, again))


def _has_structure(target: Target, data: bytes) -> bool:
    assert target.codec is not None
    try:
        target.codec.decode(data)
    except Exception:
        return False
    return True


def test_the_corpus_is_small_and_each_part_has_a_target() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} <= set(TARGETS)
    assert sum(path.stat().st_size for path in files) <= MAX_CORPUS_BYTES


def _take_long(data: bytes) -> None:
    started_s = time.process_time()
    while time.process_time() < started_s + 1.05 * MAX_CPU_S:
        pass


def _raise(error: BaseException) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        raise error

    return run


def test_a_parser_that_is_wrong_is_found() -> None:
    def target(run: Callable[[bytes], None]) -> Target:
        return Target("x", run, list, ())

    target(_raise(FaserError("documented"))).check(b"")
    with pytest.raises(FindingError, match="KeyError"):
        target(_raise(KeyError("a"))).check(b"")
    with pytest.raises(FindingError, match="GeneratorExit"):  # as a Rust panic, no Exception
        target(_raise(GeneratorExit())).check(b"")
    with pytest.raises(FindingError, match=r"3 bytes took .* s of CPU, allowed is 1"):
        target(_take_long).check(b"abc")
    with pytest.raises(FindingError, match=r"took .* MiB, allowed are 256"):
        target(lambda data: bytearray(b"x") * (300 << 20)).check(b"")  # type: ignore[arg-type, return-value]
