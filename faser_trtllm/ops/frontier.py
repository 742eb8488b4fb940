"""Which pending drafts get a row in a pass: the native op, and its plain reference, equal to the bit.

The rule is that of faser_cpu.h faser_frontier_rule, and of DESIGN section 4. Whether a slot runs never depends on a
later draft of its request, which the exactness rule asks for: the number of slots is found from each request's first
pending draft, and slots are ranked by survival, which never rises along a request; one request alone is decided place
by place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.core.value import value
from faser_trtllm.ops.arrays import Float32Array, Float64Array, Int32Array, address_of
from faser_trtllm.ops.draft_stop import sigmoid

MAX_MARGIN = 20.0  # logits; more says nothing more, and keeps a fit in range


@value
class FrontierRule:
    """How slots are ranked and bought.

    slope, intercept [NUM_MODES, max_draft_len] fp32: the acceptance of a draft at place j with margin m, of a request
    with sampling mode s, is sigmoid(slope[s, j] * min(m, MAX_MARGIN) + intercept[s, j] + offset[i]). draft_margins
    [num_requests]: each request's, by position. modes, offset, weight [num_requests]: weight is what a token of the
    request counts. ratio [num_requests, num_ahead] fp64, positive: expected survival by place over that of the first.
    verify_ms [>= num_requests * max_draft_len + 1]: of a pass with so many slots. price: tokens per ms.
    """

    slope: Float32Array
    intercept: Float32Array
    draft_margins: Sequence[Float32Array]
    modes: Sequence[int]
    offset: Float64Array
    weight: Float64Array
    ratio: Float64Array
    verify_ms: Sequence[float] | Float64Array
    price: float


class FrontierRanker:
    """faser_frontier with buffers of its own: bind() a rule, run() it for each step that it holds for."""

    def __init__(self, max_batch_size: int, max_draft_len: int) -> None:
        n, k = max_batch_size, max_draft_len
        self._max_batch_size = n
        self._max_draft_len = k
        self._slope = np.zeros((NUM_MODES, k), np.float32)
        self._intercept = np.zeros((NUM_MODES, k), np.float32)
        self._margins_at = np.zeros(n, np.uint64)
        self._modes = np.zeros(n, np.int32)
        self._offset = np.zeros(n)
        self._weight = np.zeros(n)
        self._ratio = np.zeros(n * k)
        self._verify_ms = np.zeros(n * k + 1)
        self._rule = native.FaserFrontierRule(
            slope=address_of(self._slope, np.float32),
            intercept=address_of(self._intercept, np.float32),
            draft_margins=address_of(self._margins_at, np.uint64),
            modes=address_of(self._modes, np.int32),
            offset=address_of(self._offset, np.float64),
            weight=address_of(self._weight, np.float64),
            ratio=address_of(self._ratio, np.float64),
            verify_ms=address_of(self._verify_ms, np.float64),
            max_margin=MAX_MARGIN,
            stride=k,
        )
        self._counts: list[Int32Array] = [np.zeros(n, np.int32) for _ in range(3)]  # tokens, pending, lengths
        self._addresses = [ctypes.addressof(self._rule), *(address_of(array, np.int32) for array in self._counts)]
        self._draft_margins: Sequence[Float32Array] = ()
        self._num_requests = 0

    def bind(self, rule: FrontierRule) -> None:
        """Rank by this rule from now on."""
        n, (num_rows, num_ahead) = len(rule.draft_margins), rule.ratio.shape
        if not 0 < n == num_rows <= self._max_batch_size:
            raise ValueError(
                f"a ratio of {num_rows} rows for {n} requests, from 1 to max_batch_size {self._max_batch_size} go"
            )
        if not 0 < num_ahead <= self._max_draft_len:
            raise ValueError(f"ratio has {num_ahead} places, from 1 to max_draft_len {self._max_draft_len} go")
        num_costs = n * self._max_draft_len + 1
        if len(rule.verify_ms) < num_costs:
            raise ValueError(f"verify_ms has {len(rule.verify_ms)} costs, {n} requests need {num_costs}")
        if rule.draft_margins is not self._draft_margins:
            known = dict(zip(map(id, self._draft_margins), self._margins_at.tolist(), strict=False))
            found = [known.get(id(margins)) or address_of(margins, np.float32) for margins in rule.draft_margins]
            self._margins_at[:n] = found
            self._draft_margins = rule.draft_margins  # keeps them, and so their ids and addresses
            self._modes[:n] = rule.modes
        self._slope[:] = rule.slope
        self._intercept[:] = rule.intercept
        self._offset[:n] = rule.offset
        self._weight[:n] = rule.weight
        self._ratio[: n * num_ahead] = rule.ratio.ravel()
        self._verify_ms[:num_costs] = rule.verify_ms[:num_costs]
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
        return [stop_along(survival[0], rule.ratio[0].tolist(), rule.verify_ms, rule.price)]
    weight = [float(w) for w in rule.weight]
    ahead = [row[0] * weight[i] * float(x) for i, row in enumerate(survival) if row for x in rule.ratio[i]]
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
    survival: Sequence[float], ratio: Sequence[float], verify_ms: Sequence[float] | Float64Array, price: float
) -> int:
    """How many of one request's pending drafts to run, deciding place by place on what is known up to that place.

    survival: of the pending drafts. ratio: expected, by place, for the places that the plan counted on. Slot j + 1 runs
    if, going on for some n >= 1 slots as expected from here, their survivals exceed price x their ms.
    """
    for j, alive in enumerate(survival):
        worth, floor_ms = alive, verify_ms[j]
        pays = worth > price * (verify_ms[j + 1] - floor_ms)
        for ahead in range(j + 1, len(ratio)):
            if pays:
                break
            worth += alive * ratio[ahead] / ratio[j]
            pays = worth > price * (verify_ms[ahead + 1] - floor_ms)
        if not pays:
            return j
    return len(survival)


def _survival(rule: FrontierRule, i: int, num_tokens: int, num_pending: int) -> list[float]:
    mode, offset, alive, found = rule.modes[i], float(rule.offset[i]), 1.0, []
    for place, margin in enumerate(rule.draft_margins[i][num_tokens : num_tokens + num_pending].tolist()):
        shown = margin if margin < MAX_MARGIN else MAX_MARGIN
        alive *= sigmoid(float(rule.slope[mode, place]) * shown + float(rule.intercept[mode, place]) + offset)
        found.append(alive)
    return found
