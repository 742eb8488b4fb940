"""Define the grid of passes that a profile measures, and draw held-out passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

SMALL_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 160, 192, 256, 257, 288, 320)
VERIFY_ROWS = (*SMALL_ROWS, 384, 512, 768, 1024, 1280)
# All counts up to 9, one request's with 8 drafts: interpolation across a step of the cost would overestimate drafts.
QUICK_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 32, 33, 64, 65, 128, 129, 192, 256, 257, 384, 512, 640, 768, 1024)
QUICK_BOTH = (8, 32, 384)  # counts of QUICK_ROWS that run with the most requests, too
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 256, 1024)
MAIN_CONTEXT = 256
MANY_REQUESTS = 8  # more requests only have contexts up to the main one
SAME_TOKENS = (2, 4, 8, 16, 32)  # numbers of requests that also run with equal tokens in all requests
CATCH_UP_ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT_MIX = ((1, 1), (4, 1), (8, 1), (4, 4), (16, 4), (8, 8), (32, 8), (64, 8), (32, 32), (128, 32))
QUICK_MIX = ((1, 1), (8, 1), (8, 8), (64, 8), (32, 32))  # (rows, requests) at contexts other than the main one
HELD_OUT = {"verify": 12, "draft_step": 5, "draft_rows": 5, "decode": 5}
QUICK_HELD_OUT = {"verify": 6, "draft_step": 4, "draft_rows": 4, "decode": 4}


@dataclass(frozen=True, slots=True)
class Point:
    """One pass to measure. context_len: cached tokens of each request. same_tokens: all requests run the tokens of the
    first one, so that few experts are read.

    kind: verify (logits for all rows), decode (one row per request, repeated), draft_step (one row per request, with
    sampling), draft_rows (catch-up: logits for the last row of each request), or draft_block (a pass of a block
    drafter; its draft_step is one further draft of the block).
    """

    kind: str
    partition: str
    num_rows: int
    num_requests: int
    context_len: int
    held_out: bool = False
    same_tokens: bool = False

    @property
    def curve(self) -> str:
        return f"{self.kind}@{self.partition}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the engines and their caches. max_context: tokens in a request's cache before a pass."""

    max_rows: int
    max_num_requests: int
    max_context: int
    max_draft_len: int

    def contexts(self) -> tuple[int, ...]:
        return tuple(c for c in CONTEXTS if c <= self.max_context) or (self.max_context,)

    def main_context(self) -> int:
        return max((c for c in self.contexts() if c <= MAIN_CONTEXT), default=self.contexts()[0])

    def longest(self, num_requests: int) -> int:
        """Return the longest context; long caches take time to fill, so only a few requests have them."""
        return self.max_context if num_requests <= MANY_REQUESTS else self.main_context()

    def fits(self, num_rows: int, num_requests: int) -> bool:
        """Return True if requests of at most 1 + max_draft_len rows can make up this pass."""
        return (
            num_requests <= num_rows <= min(self.max_rows, num_requests * (1 + self.max_draft_len))
            and num_requests <= self.max_num_requests
        )


def verify_points(limits: Limits, partition: str, quick: bool) -> Iterator[Point]:
    """Yield all row counts with the fewest and the most requests, and fewer counts at other contexts."""
    main = limits.main_context()
    for num_rows in QUICK_ROWS if quick else VERIFY_ROWS:
        fitting = [r for r in REQUESTS if limits.fits(num_rows, r)]
        both = not quick or num_rows in QUICK_BOTH
        for num_requests in dict.fromkeys(fitting[:1] + (fitting[-1:] if both else [])):
            yield Point("verify", partition, num_rows, num_requests, main)
    for context in _other_contexts(limits, quick):
        for num_rows, num_requests in QUICK_MIX if quick else CONTEXT_MIX:
            if limits.fits(num_rows, num_requests) and context <= limits.longest(num_requests):
                yield Point("verify", partition, num_rows, num_requests, context)


def expert_points(limits: Limits, partition: str) -> Iterator[Point]:
    """Yield pairs of passes that differ only in the experts that they read."""
    for num_rows in SAME_TOKENS:
        if limits.fits(num_rows, num_rows):
            for same_tokens in (False, True):
                yield Point("verify", partition, num_rows, num_rows, limits.main_context(), same_tokens=same_tokens)


def decode_points(limits: Limits, quick: bool) -> Iterator[Point]:
    """Yield passes of steps without drafts."""
    yield from _one_row_each("decode", "all", limits, quick)


def draft_points(limits: Limits, partition: str, quick: bool) -> Iterator[Point]:
    yield from _one_row_each("draft_step", partition, limits, quick)
    main, most = limits.main_context(), _most_requests(limits)
    for num_rows in sorted({*CATCH_UP_ROWS, most}):
        fewer = {1, num_rows // 2} - {0} if not quick else {1} if num_rows in CATCH_UP_ROWS[::2] else set()
        for num_requests in sorted({*fewer, min(num_rows, most)}):
            each = -(-num_rows // num_requests)
            context = min(main, limits.max_context - each) if each > limits.max_draft_len + 1 else main
            fits = num_requests <= limits.max_num_requests and num_rows <= limits.max_rows
            if fits and each <= CATCH_UP_ROWS[-1] and context > 0:
                yield Point("draft_rows", partition, num_rows, num_requests, context)
    for context in _other_contexts(limits, quick):
        for num_requests in _fewest_and_most(limits, context):
            yield Point("draft_rows", partition, num_requests, num_requests, context)


def _one_row_each(kind: str, partition: str, limits: Limits, quick: bool) -> Iterator[Point]:
    for num_requests in REQUESTS:
        if num_requests <= limits.max_num_requests:
            yield Point(kind, partition, num_requests, num_requests, limits.main_context())
    for context in _other_contexts(limits, quick):
        for num_requests in _fewest_and_most(limits, context):
            yield Point(kind, partition, num_requests, num_requests, context)


def _other_contexts(limits: Limits, quick: bool) -> list[int]:
    main = limits.main_context()
    return [c for c in limits.contexts() if c < main or (c > main and not quick)]


def _most_requests(limits: Limits, context: int = 0) -> int:
    """Return the largest number of REQUESTS whose caches reach this context."""
    return max(r for r in REQUESTS if r <= limits.max_num_requests and context <= limits.longest(r))


def _fewest_and_most(limits: Limits, context: int) -> list[int]:
    """Return [1, most requests]: the latency of attention limits one request, the bytes of caches many."""
    return sorted({1, _most_requests(limits, context)})


def held_out_points(limits: Limits, seed: int, quick: bool = False) -> Iterator[Point]:
    """Yield random held-out points of every kind, also between those of the grid, on the partition "all" only."""
    rng = np.random.default_rng(seed)
    most = limits.max_num_requests
    seen: set[tuple[str, int, int]] = set()
    for kind, number in (QUICK_HELD_OUT if quick else HELD_OUT).items():
        found = 0
        for _ in range(50 * number):
            if found == number:
                break
            num_requests = round(2 ** rng.uniform(0, np.log2(most))) if most > 1 else 1
            num_rows = num_requests
            if kind == "verify":
                num_rows *= 1 + int(rng.integers(0, limits.max_draft_len + 1))
                num_rows -= int(rng.integers(0, 3))
            elif kind == "draft_rows":
                num_rows += int(rng.integers(0, num_requests + 1))
            context = _draw_context(rng, limits.longest(num_requests))
            is_new = (kind, num_rows, num_requests) not in seen
            if is_new and limits.fits(num_rows, num_requests):
                seen.add((kind, num_rows, num_requests))
                found += 1
                yield Point(kind, "all", num_rows, num_requests, context, held_out=True)


def _draw_context(rng: np.random.Generator, longest: int) -> int:
    shortest = max(1, min(CONTEXTS[0], longest // 2))
    return int(rng.integers(shortest, longest + 1))
