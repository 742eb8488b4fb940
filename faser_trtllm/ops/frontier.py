"""Which pending drafts get a row in a pass: the native op, and its plain reference, equal to the bit.

The rule is that of faser_cpu.h faser_frontier_rule, and of DESIGN section 4. Whether a slot runs never depends on a
later draft of its request, which the exactness rule asks for: the number of slots is found from each request's first
pending draft, and slots are ranked by survival, which never rises along a request; one request alone is decided place
by place.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.core.value import value
from faser_trtllm.ops.arrays import Float32Array, Float64Array, Int32Array, address_of
from faser_trtllm.ops.draft_stop import sigmoid

MAX_MARGIN = 20.0  # logits; more says nothing more, and keeps a fit in range


@value
class FrontierRule:
    """How slots are ranked and bought; nothing of it changes once it is made, but for the margins.

    slope, intercept [NUM_MODES, max_draft_len] fp32: the acceptance of a draft at place j with margin m, of a request
    with sampling mode s, is sigmoid(slope[s, j] * min(m, MAX_MARGIN) + intercept[s, j] + offset[i]). prior [NUM_MODES,
    max_draft_len] fp64: what is expected without a margin, as log-odds that offset is added to. draft_margins
    [num_requests]: each request's, by position. modes, offset, weight [num_requests]: weight is what a token of the
    request counts. verify_ms [>= num_requests * max_draft_len + 1]: of a pass with so many slots. price: tokens per ms.
    num_ahead: places that a request is expected to draft, 1 to max_draft_len.
    """

    slope: Float32Array
    intercept: Float32Array
    prior: Float64Array
    draft_margins: Sequence[Float32Array]
    modes: Sequence[int]
    offset: Float64Array
    weight: Float64Array
    verify_ms: Sequence[float] | Float64Array
    price: float
    num_ahead: int


class FrontierRanker:
    """faser_frontier with buffers of its own: bind() a rule, run() it for each step that it holds for."""

    def __init__(self, max_batch_size: int, max_draft_len: int) -> None:
        n, k = max_batch_size, max_draft_len
        self._max_batch_size = n
        self._max_draft_len = k
        self._slope = np.zeros((NUM_MODES, k), np.float32)
        self._intercept = np.zeros((NUM_MODES, k), np.float32)
        self._prior = np.zeros((NUM_MODES, k))
        self._margins_at = np.zeros(n, np.uint64)
        self._modes = np.zeros(n, np.int32)
        self._offset = np.zeros(n)
        self._weight = np.zeros(n)
        self._verify_ms = np.zeros(n * k + 1)
        self._rule = native.FaserFrontierRule(
            slope=address_of(self._slope, np.float32),
            intercept=address_of(self._intercept, np.float32),
            prior=address_of(self._prior, np.float64),
            draft_margins=address_of(self._margins_at, np.uint64),
            modes=address_of(self._modes, np.int32),
            offset=address_of(self._offset, np.float64),
            weight=address_of(self._weight, np.float64),
            verify_ms=address_of(self._verify_ms, np.float64),
            max_margin=MAX_MARGIN,
            stride=k,
        )
        self._counts: list[Int32Array] = [np.zeros(n, np.int32) for _ in range(3)]  # tokens, pending, lengths
        self._addresses = [ctypes.addressof(self._rule), *(address_of(array, np.int32) for array in self._counts)]
        self._bound: FrontierRule | None = None  # also keeps the margins, and so their ids and addresses
        self._num_requests = 0

    def bind(self, rule: FrontierRule) -> None:
        """Rank by this rule from now on."""
        n, num_ahead = len(rule.draft_margins), rule.num_ahead
        if not 0 < n <= self._max_batch_size:
            raise ValueError(f"there are margins of {n} requests, from 1 to max_batch_size {self._max_batch_size} go")
        if not 0 < num_ahead <= self._max_draft_len:
            raise ValueError(f"num_ahead is {num_ahead}, from 1 to max_draft_len {self._max_draft_len} go")
        num_costs = n * self._max_draft_len + 1
        if len(rule.verify_ms) < num_costs:
            raise ValueError(f"verify_ms has {len(rule.verify_ms)} costs, {n} requests need {num_costs}")
        last, self._bound = self._bound, rule
        margins, known = rule.draft_margins, () if last is None else last.draft_margins
        if margins is not known:
            at = dict(zip(map(id, known), self._margins_at.tolist(), strict=False))
            self._margins_at[:n] = [at.get(id(one)) or address_of(one, np.float32) for one in margins]
        if len(known) != n:
            last = None
        if last is None or rule.slope is not last.slope or rule.intercept is not last.intercept:
            self._slope[:], self._intercept[:] = rule.slope, rule.intercept
        if last is None or rule.prior is not last.prior:
            self._prior[:] = rule.prior
        if last is None or rule.verify_ms is not last.verify_ms:
            self._verify_ms[:num_costs] = rule.verify_ms[:num_costs]
        if last is None or rule.modes is not last.modes:
            self._modes[:n] = rule.modes
        if last is None or rule.offset is not last.offset:
            self._offset[:n] = rule.offset
        if last is None or rule.weight is not last.weight:
            self._weight[:n] = rule.weight
        self._rule.price = rule.price
        self._rule.num_requests = self._num_requests = n
        self._rule.num_ahead = num_ahead

    def run(self, num_tokens: Sequence[int], num_pending: Sequence[int]) -> list[int]:
        """Slots per request, 0 to num_pending[i] <= max_draft_len, which are behind num_tokens[i] committed tokens."""
        n = self._num_requests
        tokens, pending, lengths = self._counts
        tokens[:n] = num_tokens
        pending[:n] = num_pending
        status = native.library().faser_frontier(*self._addresses)
        if status:
            native.check(status, f"ranking {list(num_pending)} pending drafts")
        return lengths[:n].tolist()  # type: ignore[no-any-return]


def frontier_reference(rule: FrontierRule, num_tokens: Sequence[int], num_pending: Sequence[int]) -> list[int]:
    """FrontierRanker.run in plain loops."""
    requests = range(len(num_pending))
    survival = [_survival(rule, i, num_tokens[i], num_pending[i]) for i in requests]
    if len(requests) == 1:
        return [stop_along(survival[0], _expected(rule, 0), rule.verify_ms, rule.price)]
    weight = [float(w) for w in rule.weight]
    ahead: list[float] = []
    for i, row in enumerate(survival):
        ahead += accumulate(_expected(rule, i)[1:], operator.mul, initial=row[0] * weight[i]) if row else ()
    num_slots = num_paying(sorted(ahead, reverse=True), rule.verify_ms, rule.price)
    if num_slots >= sum(num_pending):
        return list(num_pending)
    return top_prefixes([[s * weight[i] for s in row] for i, row in enumerate(survival)], num_slots)


def num_paying(ranked: Sequence[float], verify_ms: Sequence[float] | Float64Array, price: float) -> int:
    """How many of the best slots to run: argmax over n, 0 included, of their survivals - price x ms.

    ranked: survivals, descending; verify_ms [>= n + 1]. Time already spent on drafting is no concern.
    """
    best, best_worth, gained = 0, -price * verify_ms[0], 0.0
    for n, survival in enumerate(ranked, 1):
        gained += survival
        worth = gained - price * verify_ms[n]
        if worth > best_worth:
            best, best_worth = n, worth
    return best


def top_prefixes(worth: Sequence[Sequence[float]], num_slots: int) -> list[int]:
    """Slots per request if the num_slots best of worth[i] run, which never rises; of equals, earlier requests'."""
    flat = [(-one, i) for i, row in enumerate(worth) for one in row]
    flat.sort()
    lengths = [0] * len(worth)
    for _, i in flat[:num_slots]:
        lengths[i] += 1
    return lengths


def stop_along(
    survival: Sequence[float], expected: Sequence[float], verify_ms: Sequence[float] | Float64Array, price: float
) -> int:
    """How many of one request's pending drafts to run, deciding place by place on what is known up to that place.

    survival: of the pending drafts. expected: acceptance by place, for the places that the plan counted on. Slot j + 1
    runs if, going on for some n >= 1 slots as expected from here, their survivals exceed price x their ms.
    """
    for j, alive in enumerate(survival):
        worth, floor_ms = alive, verify_ms[j]
        pays = worth > price * (verify_ms[j + 1] - floor_ms)
        for ahead in range(j + 1, len(expected)):
            if pays:
                break
            alive *= expected[ahead]
            worth += alive
            pays = worth > price * (verify_ms[ahead + 1] - floor_ms)
        if not pays:
            return j
    return len(survival)


def _expected(rule: FrontierRule, i: int) -> list[float]:
    """Acceptance by place, before drafting."""
    offset = float(rule.offset[i])
    return [sigmoid(float(logit) + offset) for logit in rule.prior[rule.modes[i]][: rule.num_ahead]]


def _survival(rule: FrontierRule, i: int, num_tokens: int, num_pending: int) -> list[float]:
    mode, offset, alive, found = rule.modes[i], float(rule.offset[i]), 1.0, []
    for place, margin in enumerate(rule.draft_margins[i][num_tokens : num_tokens + num_pending].tolist()):
        shown = margin if margin < MAX_MARGIN else MAX_MARGIN
        alive *= sigmoid(float(rule.slope[mode, place]) * shown + float(rule.intercept[mode, place]) + offset)
        found.append(alive)
    return found
