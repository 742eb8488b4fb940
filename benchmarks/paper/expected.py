"""Tokens per step of drafts in a chain or a tree, with the simulation's random acceptance."""

from __future__ import annotations

import functools
import math

import numpy as np

from lab.planner.load.acceptance import Acceptance, AcceptanceProcess

NUM_REQUESTS, OUTPUT_LEN = 512, 256


@functools.lru_cache(maxsize=1024)
def tokens_per_step(acceptance: float, widths: tuple[int, ...], caught: float = 0.0, seed: int = 0) -> float:
    """Return tokens per step of requests from their first token to their last.

    widths: candidates by place; (1, 1, 1) is a chain of three. caught: the share of failed drafts for which one of two
    other candidates is right; fewer or more candidates catch less or more of them.
    """
    depth = len(widths)
    process = AcceptanceProcess(Acceptance.of(acceptance), NUM_REQUESTS, OUTPUT_LEN, max(1, depth), seed)
    for slot in range(NUM_REQUESTS):
        process.begin(slot, slot, OUTPUT_LEN)
    if not depth:
        return 1.0
    rng = np.random.default_rng(seed)
    by_place = np.array([caught_by(width, caught) for width in widths])
    places = np.arange(depth)
    done = np.zeros(NUM_REQUESTS, np.int64)
    slots = np.arange(NUM_REQUESTS, dtype=np.int32)
    num_steps = 0
    while slots.size:
        positions = done[slots][:, None] + places
        _, passes = process.draft(slots, positions, np.broadcast_to(places, positions.shape))
        passes = passes | (rng.random(passes.shape) < by_place)
        done[slots] += 1 + np.cumprod(passes, axis=1).sum(axis=1)
        num_steps += slots.size
        slots = slots[done[slots] < OUTPUT_LEN]
    return float(np.minimum(done, OUTPUT_LEN).sum() / num_steps)


def caught_by(width: int, of_three: float) -> float:
    """Return the share caught by width candidates, if each doubling leaves the same share of failures."""
    return float(1.0 - (1.0 - of_three) ** (math.log2(width) / math.log2(3)))


def levels(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of a tree's nodes by depth."""
    return tuple(int(count) for count in np.cumprod(widths)) if widths else ()
