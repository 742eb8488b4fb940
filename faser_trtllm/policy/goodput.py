"""The arithmetic of goodput, in tokens per ms: how many slots pay, given their survivals and the measured costs.

A slot is a row that verifies a pending draft. Row j of a request yields one token if the drafts up to it are all
accepted, so a pass over base rows and slots S yields base tokens + sum of the survivals of S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of one step, in ms.

    verify [num_slots + 1]: a pass with so many slots besides its base rows. draft_first [batch_size + 1]: the first
    step of a draft call for so many requests (0 for none), which also runs what was committed since the last one.
    draft_step [batch_size + 1]: a further step. overhead: of a step with drafting, beside these; off_ms: all of
    a step without.
    """

    verify: Sequence[float] | FloatArray
    draft_first: Sequence[float] | FloatArray
    draft_step: Sequence[float] | FloatArray
    overhead: float
    off_ms: float


@dataclass(frozen=True, slots=True)
class Choice:
    """lengths: drafts per request. Goodputs: of this choice, and of drafting nothing; ms of drafting."""

    lengths: list[int]
    goodput: float
    off_goodput: float
    draft_ms: float

    @property
    def num_slots(self) -> int:
        return sum(self.lengths)


def step_ms(lengths: Sequence[int], costs: StepCosts) -> float:
    """Of a step that drafts and verifies so many tokens for each request."""
    longest = max(lengths)
    if longest == 0:
        return costs.off_ms
    active = [sum(length > place for length in lengths) for place in range(longest)]
    draft_ms = float(costs.draft_first[active[0]]) + sum(float(costs.draft_step[count]) for count in active[1:])
    return draft_ms + float(costs.verify[sum(lengths)]) + costs.overhead


def best_uniform(
    survival: Sequence[float],
    num_requests: int,
    base_tokens: float,
    costs: StepCosts,
    max_length: int,
    min_length: int = 0,
) -> Choice:
    """The one length for all requests with the most goodput (TurboSpec's and the best schedule's question)."""
    off = base_tokens / costs.off_ms
    best, best_goodput = min_length, 0.0 if min_length else off
    tokens, step = base_tokens, costs.draft_step[num_requests]
    draft_ms = best_draft_ms = 0.0
    for k in range(1, max_length + 1):
        tokens += num_requests * survival[k - 1]
        draft_ms += step if k > 1 else costs.draft_first[num_requests]
        ms = draft_ms + costs.verify[k * num_requests] + costs.overhead
        if k >= min_length and tokens / ms > best_goodput:
            best, best_goodput, best_draft_ms = k, tokens / ms, draft_ms
    return Choice([best] * num_requests, float(best_goodput), float(off), float(best_draft_ms))


def best_slots(survival: FloatArray, base_tokens: float, costs: StepCosts) -> Choice:
    """The slots with the most goodput: a global argmax over their number, over the staircase, none included.

    survival [num_requests, max_length]: non-increasing along a request, so the n best slots are prefixes; 0 where a
    slot cannot be. Drafting is paid by step: step t runs for the requests that draft more than t tokens.
    """
    num_requests, max_length = survival.shape
    off = base_tokens / costs.off_ms
    flat = survival.ravel()
    order = np.argsort(-flat, kind="stable")
    order = order[: int(np.count_nonzero(flat > 0.0))]
    if order.size == 0:
        return Choice([0] * num_requests, off, off, 0.0)
    gained = np.cumsum(flat[order])
    place = order % max_length
    active = np.cumsum(place[:, None] == np.arange(max_length), axis=0)[np.arange(order.size), place]
    first, step = np.asarray(costs.draft_first), np.asarray(costs.draft_step)
    drafting = np.cumsum(np.where(place == 0, first[active] - first[active - 1], step[active] - step[active - 1]))
    ms = drafting + np.asarray(costs.verify)[1 : order.size + 1] + costs.overhead
    goodput = (base_tokens + gained) / ms
    best = int(goodput.argmax())
    if goodput[best] <= off:
        return Choice([0] * num_requests, off, off, 0.0)
    lengths = np.bincount(order[: best + 1] // max_length, minlength=num_requests).tolist()
    return Choice(lengths, float(goodput[best]), off, float(drafting[best]))


def best_slots_few(
    survival: Sequence[Sequence[float]], base_tokens: float, costs: StepCosts, limits: Sequence[int]
) -> Choice:
    """best_slots for a few requests, in a plain loop; limits[i]: of the slots of request i."""
    off = base_tokens / costs.off_ms
    slots: list[tuple[float, int, int]] = []
    for i, (row, limit) in enumerate(zip(survival, limits, strict=True)):
        slots += [(-alive, i, j) for j, alive in enumerate(row[:limit])]
    slots.sort()
    first, step, verify, overhead = costs.draft_first, costs.draft_step, costs.verify, costs.overhead
    active = [0] * max([*limits, 1])
    best, best_goodput, best_draft_ms = 0, off, 0.0
    tokens, draft_ms = base_tokens, 0.0
    for count, (minus, _, place) in enumerate(slots, 1):
        tokens -= minus
        active[place] = a = active[place] + 1
        draft_ms += step[a] - step[a - 1] if place else first[a] - first[a - 1]
        goodput = tokens / (draft_ms + verify[count] + overhead)
        if goodput > best_goodput:
            best, best_goodput, best_draft_ms = count, goodput, draft_ms
    lengths = [0] * len(survival)
    for _, i, _ in slots[:best]:
        lengths[i] += 1
    return Choice(lengths, float(best_goodput), float(off), float(best_draft_ms))


def best_row(survival: Sequence[float], base_tokens: float, costs: StepCosts, max_length: int) -> Choice:
    """best_slots for one request, without numpy."""
    off = base_tokens / costs.off_ms
    best, best_goodput = 0, off
    tokens, step = base_tokens, costs.draft_step[1]
    verify, overhead = costs.verify, costs.overhead
    draft_ms = costs.draft_first[1] - step
    best_draft_ms = 0.0
    for k in range(1, max_length + 1):
        tokens += survival[k - 1]
        draft_ms += step
        goodput = tokens / (draft_ms + verify[k] + overhead)
        if goodput > best_goodput:
            best, best_goodput, best_draft_ms = k, goodput, draft_ms
    return Choice([best], best_goodput, off, best_draft_ms)
