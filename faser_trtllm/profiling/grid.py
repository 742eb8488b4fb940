"""The grid of measured passes, and the held-out ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

SMALL_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 160, 192, 256, 288)
VERIFY_ROWS = (*SMALL_ROWS, 384, 512, 768, 1024, 1280)
# Every length of a request or two, where a stair between two measured counts would make drafting look dear.
QUICK_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 32, 33, 64, 128, 384, 1024)
QUICK_BOTH = (8, 32, 384)  # of these, with the fewest and the most requests
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 256, 1024)
MAIN_CONTEXT = 256
MANY_REQUESTS = 8  # more rows than this are measured up to the main context only
CATCH_UP_ROWS = (1, 2, 4, 8, 16, 32, 64)
HELD_OUT_VERIFY = 12
HELD_OUT_DRAFT = 5


@dataclass(frozen=True, slots=True)
class Point:
    """One pass. kind: verify (all rows give logits), decode (one row per request, pass after pass),
    draft_step (one row per request, drawn from), draft_rows (catch-up: only the last row of each request gives logits).
    context_len: cached tokens of each request."""

    kind: str
    partition: str
    num_rows: int
    num_requests: int
    context_len: int
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the engines and their caches."""

    max_rows: int
    max_num_requests: int
    max_context: int
    max_draft_len: int

    def contexts(self) -> tuple[int, ...]:
        return tuple(c for c in CONTEXTS if c <= self.max_context) or (self.max_context,)

    def main_context(self) -> int:
        return max((c for c in self.contexts() if c <= MAIN_CONTEXT), default=self.contexts()[0])

    def longest(self, num_requests: int) -> int:
        """Only a few requests get long caches, since filling them means running their prompts."""
        return self.max_context if num_requests <= MANY_REQUESTS else self.main_context()

    def fits(self, num_rows: int, num_requests: int) -> bool:
        """A frontier has at least the last committed token and at most max_draft_len drafts behind it."""
        return (
            num_requests <= num_rows <= min(self.max_rows, num_requests * (1 + self.max_draft_len))
            and num_requests <= self.max_num_requests
        )


def verify_points(limits: Limits, partition: str, quick: bool) -> Iterator[Point]:
    """The staircase over rows, each count with the fewest and the most requests; other contexts at fewer counts."""
    main = limits.main_context()
    for num_rows in QUICK_ROWS if quick else VERIFY_ROWS:
        fitting = [r for r in REQUESTS if limits.fits(num_rows, r)]
        both = not quick or num_rows in QUICK_BOTH
        for num_requests in dict.fromkeys(fitting[:1] + (fitting[-1:] if both else [])):
            yield Point("verify", partition, num_rows, num_requests, main)
    for context in limits.contexts():
        if context == main or (quick and context > main):
            continue
        for num_rows, num_requests in ((1, 1), (8, 1), (8, 8)) if quick else _CONTEXT_MIX:
            if limits.fits(num_rows, num_requests) and context <= limits.longest(num_requests):
                yield Point("verify", partition, num_rows, num_requests, context)


_CONTEXT_MIX = ((1, 1), (4, 1), (8, 1), (4, 4), (16, 4), (8, 8), (32, 8), (64, 8), (32, 32), (128, 32))


def decode_points(limits: Limits, quick: bool) -> Iterator[Point]:
    """Passes of steps without drafts."""
    main = limits.main_context()
    for num_requests in REQUESTS:
        for context in limits.contexts():
            if num_requests > limits.max_num_requests or (context != main and quick):
                continue
            if context == main or num_requests in (1, MANY_REQUESTS):
                yield Point("decode", "all", num_requests, num_requests, context)


def draft_points(limits: Limits, partition: str, quick: bool) -> Iterator[Point]:
    main = limits.main_context()
    for num_requests in REQUESTS:
        if num_requests > limits.max_num_requests:
            continue
        yield Point("draft_step", partition, num_requests, num_requests, main)
        for context in limits.contexts():
            if context != main and not quick and num_requests in (1, MANY_REQUESTS):
                yield Point("draft_step", partition, num_requests, num_requests, context)
    for num_rows in CATCH_UP_ROWS[::2] if quick else CATCH_UP_ROWS:
        for num_requests in sorted({1, num_rows} if quick else {1, num_rows // 2, num_rows} - {0}):
            longest = main + -(-num_rows // num_requests)
            if longest > limits.max_context + limits.max_draft_len + 1:  # as far as a frontier may reach
                continue
            if num_requests <= limits.max_num_requests and num_rows <= limits.max_rows:
                yield Point("draft_rows", partition, num_rows, num_requests, main)


def held_out_points(limits: Limits, seed: int) -> Iterator[Point]:
    """Held-out points drawn between the grid's lines, on the partition "all" only."""
    rng = np.random.default_rng(seed)
    most_requests = limits.max_num_requests
    seen: set[tuple[int, int]] = set()
    for _ in range(50 * HELD_OUT_VERIFY):
        if len(seen) == HELD_OUT_VERIFY:
            break
        num_requests = round(2 ** rng.uniform(0, np.log2(most_requests))) if most_requests > 1 else 1
        num_rows = num_requests * (1 + int(rng.integers(0, limits.max_draft_len + 1))) - int(rng.integers(0, 3))
        context = _draw_context(rng, limits.longest(num_requests))
        if limits.fits(num_rows, num_requests) and (num_rows, num_requests) not in seen:
            seen.add((num_rows, num_requests))
            yield Point("verify", "all", num_rows, num_requests, context, held_out=True)
    drafted = [r for r in (3, 6, 12, 20, 28) if r <= most_requests][:HELD_OUT_DRAFT]
    for num_requests in drafted:
        context = _draw_context(rng, limits.longest(num_requests))
        yield Point("draft_step", "all", num_requests, num_requests, context, held_out=True)


def _draw_context(rng: np.random.Generator, longest: int) -> int:
    shortest = min(CONTEXTS[0], longest)
    return int(rng.integers(shortest, longest + 1))
