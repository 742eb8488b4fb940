"""Random states: our scheduler does what TensorRT-LLM's rules with our differences say."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from faser_trtllm.trtllm.gate import load_bindings
from lab.trtllm_check.vectors import Schedule, Vector, VectorLimits, VectorRequest, run_on_tensorrt_llm
from tests.support.effort import pick
from tests.trtllm.native_vectors import MAX_DRAFT_LEN, run_natively
from tests.trtllm.reference import OURS, our_unit, ours, reasons
from tests.trtllm.rules_kv import blocks_for

NUM_STATES = pick(1_000, 20_000)
DOCUMENT = Path(__file__).parents[2] / "lab" / "trtllm_check" / "README.md"
NOT_OF_A_STEP = {"first-come-first-served-only", "no-static-batch", "the-next-rows-block-is-kept"}
"""Differences that no single step shows which is chunked first come first served, or not at all."""


def random_state(seed: int) -> Vector:
    """A state that a service can be in: those that have begun, in order, then newcomers."""
    rng = random.Random(seed)
    size, max_batch_size = rng.choice([1, 2, 4, 8]), rng.randint(1, 6)
    capacity = rng.choice(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
    limits = VectorLimits(
        max_batch_size=max_batch_size,
        max_num_tokens=max_batch_size + rng.choice([0, 1, 3, 6, 10, 16, 30]),
        max_seq_len=64,
        num_blocks=blocks_for(64, size),
        tokens_per_block=size,
        chunk_unit_size=rng.choice([1, 2, 4, 8, 16]),
        chunking=rng.choice(["FIRST_COME_FIRST_SERVED", "FIRST_COME_FIRST_SERVED", None]),
        capacity=capacity,
    )
    longest = 30 if limits.chunking else min(30, limits.max_num_tokens)
    begun = [_begun(rng, limits, longest) for _ in range(rng.randint(0, max_batch_size))]
    newcomers = [
        VectorRequest(rng.randint(1, longest), rng.randint(1, 20)) for _ in range(rng.randint(0 if begun else 1, 6))
    ]
    everyone = (*begun, *newcomers)
    least = max(_longest_end(request, limits) for request in everyone)
    if capacity == "GUARANTEED_NO_EVICT":
        least = max(least, sum(_longest_end(request, limits) for request in begun))
    else:
        least = max(least, sum(_held(request, limits) for request in begun))
    return Vector(
        f"state-{seed}", replace(limits, num_blocks=least + rng.choice([0, 1, 2, 4, 8])), everyone, Schedule({}, {}, ())
    )


def _begun(rng: random.Random, limits: VectorLimits, longest: int) -> VectorRequest:
    prompt, max_tokens = rng.randint(1, longest), rng.randint(1, 20)
    if limits.chunking and prompt > 1 and rng.random() < 0.4:
        return VectorRequest(prompt, max_tokens, position=rng.randint(1, prompt - 1))
    generated = rng.randint(1, max_tokens)
    return VectorRequest(
        prompt, max_tokens, generated, rng.randint(0, min(MAX_DRAFT_LEN, max(0, max_tokens - generated - 1)))
    )


def _longest_end(request: VectorRequest, limits: VectorLimits) -> int:
    return blocks_for(min(request.prompt + request.max_tokens, limits.max_seq_len), limits.tokens_per_block)


def _held(request: VectorRequest, limits: VectorLimits) -> int:
    return blocks_for(max(request.prompt, request.num_tokens - 1), limits.tokens_per_block)


def without_blocks(found: Schedule) -> Schedule:
    return Schedule(found.context, found.generation, found.paused)


@pytest.fixture(scope="module")
def theirs(modules: object) -> Callable[[Vector], Schedule]:
    """A step of TensorRT-LLM's, as the stand-ins model it."""
    bindings = load_bindings()
    return lambda vector: without_blocks(run_on_tensorrt_llm(vector, bindings))


def test_our_scheduler_differs_in_what_is_documented_and_nothing_else(theirs: Callable[[Vector], Schedule]) -> None:
    """It does what the reference with the differences does, and what TensorRT-LLM does where none of them can show."""
    equal = 0
    for seed in range(NUM_STATES):
        vector = random_state(seed)
        found, their = without_blocks(run_natively(vector)), theirs(vector)
        assert found == ours(vector), vector
        assert found == their or reasons(vector, their), vector
        equal += found == their
    assert NUM_STATES // 4 < equal < NUM_STATES * 0.8, "both equal and different steps, or the states are too simple"


def test_each_difference_shows_where_no_other_can(theirs: Callable[[Vector], Schedule]) -> None:
    alone = set()
    for seed in range(20_000):
        vector = random_state(seed)
        their = theirs(vector)
        why = reasons(vector, their)
        if len(why) == 1 and ours(vector) != their:
            alone |= why
        if alone == OURS:
            return
    raise AssertionError(f"never seen: {OURS - alone}")


def test_the_reference_has_every_documented_difference() -> None:
    documented = set(re.findall(r"^\| `([a-z-]+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert documented == OURS | NOT_OF_A_STEP


def test_the_states_have_everything_that_the_rules_speak_of(theirs: Callable[[Vector], Schedule]) -> None:
    """So that agreement is not for want of cases."""
    seen = Counter()
    for seed in range(1_000):
        vector = random_state(seed)
        plan, limits = theirs(vector), vector.limits
        seen[limits.capacity] += 1
        seen["paused"] += bool(plan.paused)
        seen["no chunks"] += limits.chunking is None
        seen["drafts"] += any(plan.generation.values())
        seen["one token left"] += any(r.position == r.prompt - 1 > 0 for r in vector.requests)
        seen["unfinished chunk"] += any(
            rows < vector.requests[int(name)].prompt - vector.requests[int(name)].position
            for name, rows in plan.context.items()
        )
        begun = sum(request.has_started for request in vector.requests)
        seen["admitted"] += any(int(name) >= begun for name in plan.context)
        seen["not admitted"] += len(plan.context) + len(plan.generation) < len(vector.requests)
        seen["small unit"] += our_unit(limits) < limits.chunk_unit_size
    assert len(seen) == 10
    assert min(seen.values()) > 30, seen
