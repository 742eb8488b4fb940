"""The rule that ends drafting early, by hand; tests/sampling/test_early_stop.py holds the native code to it."""

import math

import numpy as np
import pytest

from faser_trtllm import native
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.sampling_params import NUM_MODES, SamplingMode
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.draft_stop import NativeStop, pending_survival
from lab.reference.draft_stop import acceptance, goes_on, pending_margins, pending_sources, survival
from tests.support.sampling_slots import Slots

GREEDY, SEEDED, SAMPLED = SamplingMode


def stop(
    slope=(1.0, 1.0, 1.0),
    intercept=(0.0, 0.0, 0.0),
    prior=(0.8, 0.5, 0.25),
    spread=(0.0, 0.0, 0.0),
    row_price=(0.0, 0.0, 0.0),
    step_price=(0, 0, 0, 0),
):
    """slope, intercept, prior and spread of greedy requests; those of the other modes would never draft on."""
    greedy = slope, intercept, prior, spread
    others = (-9.0, -9.0, -9.0), (-9.0, -9.0, -9.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)
    pairs = zip(greedy, others, strict=True)
    curves = [np.array([mine, *[none] * (NUM_MODES - 1)], np.float32) for mine, none in pairs]
    return DraftStop(*curves, np.array(row_price, np.float32), np.array(step_price, np.float32))


def going(rule, margins, modes=None):
    return goes_on(rule, [GREEDY] * len(margins) if modes is None else modes, margins)


def margins(*values):
    return np.array(values, np.float32)


def test_acceptance_is_a_sigmoid_of_its_place():
    rule = stop(slope=(1.0, 2.0, 0.0), intercept=(0.5, -1.0, 0.0))
    assert acceptance(rule, GREEDY, 0, 1.5) == pytest.approx(1 / (1 + math.exp(-2)))
    assert acceptance(rule, GREEDY, 1, 0.25) == pytest.approx(1 / (1 + math.exp(0.5)))
    assert acceptance(rule, GREEDY, 2, 7.0) == 0.5
    assert survival(rule, GREEDY, margins(1.5, 0.25)) == acceptance(rule, GREEDY, 0, 1.5) * acceptance(
        rule, GREEDY, 1, 0.25
    )
    assert survival(rule, GREEDY, margins()) == 1.0


def test_the_largest_margins_do_not_overflow():
    steep = stop(slope=(1e4, -1e4, 0.0))
    assert acceptance(steep, GREEDY, 0, 1e4) == 1.0
    assert acceptance(steep, GREEDY, 1, 1e4) == 0.0


def test_a_request_stops_when_its_next_row_costs_more_than_it_is_worth():
    """At margin 0 each draft survives with 1/2, so the next ones are worth 1/2 x prior[1] and 1/4 x prior[2]."""
    rule = stop(row_price=(9, 0.25, 0.0625))
    assert going(rule, [margins(0), margins(0, 0), margins(0, -0.01)]) == [True, True, False]
    assert going(stop(row_price=(0, 0.26, 0)), [margins(0), margins(0, 0)]) == [False, True]


def test_a_row_is_paid_where_its_margin_turns_out_well():
    """At margin 0 the next draft is reached with 1/2. At probabilities of 1/4 and 3/4 it is worth 1/8 or 3/8."""
    spread = (0, 0.25, 0)
    # The row pays for the likely half only: (3/8 - 1/4) / 2, where the mean would bring nothing.
    assert going(stop(spread=spread, row_price=(0, 0.25, 0), step_price=(0, 0.0625)), [margins(0)]) == [True]
    assert going(stop(spread=spread, row_price=(0, 0.25, 0), step_price=(0, 0.063)), [margins(0)]) == [False]
    assert going(stop(row_price=(0, 0.25, 0), step_price=(0, 0.0625)), [margins(0)]) == [False]
    # For both: the mean.
    assert going(stop(spread=spread, row_price=(0, 0.125, 0), step_price=(0, 0.125)), [margins(0)]) == [True]
    assert going(stop(spread=spread, row_price=(0, 0.125, 0), step_price=(0, 0.126)), [margins(0)]) == [False]
    # For neither.
    assert going(stop(spread=spread, row_price=(0, 0.375, 0)), [margins(0)]) == [True]
    assert going(stop(spread=spread, row_price=(0, 0.376, 0)), [margins(0)]) == [False]


def test_each_sampling_mode_has_its_own_distribution():
    rule = stop(row_price=(0, 0.2, 0.2))
    for curve in (rule.slope, rule.intercept, rule.prior):
        curve[SEEDED] = 2 * curve[GREEDY]
    assert acceptance(rule, SEEDED, 0, 1.5) == acceptance(rule, GREEDY, 0, 3.0)
    # 1/2 x prior: 1/4 and 1/2.
    rule.row_price[1] = 0.3
    assert going(rule, [margins(0)] * 3, [GREEDY, SEEDED, SAMPLED]) == [False, True, False]


def test_all_stop_when_a_step_does_not_pay():
    """Gains: 1/2 x prior[1] and 1/4 x prior[2], so 0.25 and 0.0625."""
    both = [margins(0), margins(0, 0)]
    assert going(stop(step_price=(0, 0, 0.3125)), both) == [True, True]
    assert going(stop(step_price=(0, 0, 0.32)), both) == [False, False]
    # Rows are paid before the step is; a request that stops counts neither in the gain nor in the price.
    dear = (0, 0.125, 0.1)
    assert going(stop(step_price=(0, 0.125, 9), row_price=dear), both) == [True, False]
    assert going(stop(step_price=(0, 0.13, 0), row_price=dear), both) == [False, False]
    assert going(stop(step_price=(1, 0, 0)), []) == []


def test_the_margin_of_a_draft_that_nobody_drew_is_its_log_odds():
    """The curves of the draft model's drafts do not count for it."""
    rule = stop(slope=(9.0, 2.0, 9.0), intercept=(9.0, -1.0, 9.0))
    mixed = np.array([native.BY_SUFFIX, native.BY_MODEL, native.BY_SUFFIX], np.int8)
    odds = margins(math.log(3), 0.5, math.log(4))
    assert survival(rule, GREEDY, odds, mixed) == pytest.approx(0.75 * 0.5 * 0.8)
    assert survival(rule, GREEDY, odds, mixed[:0]) == survival(rule, GREEDY, odds)
    cut = stop(row_price=(0, 0.26, 0))
    assert going(cut, [margins(math.log(3))]) == goes_on(cut, [GREEDY], [margins(math.log(3))], [mixed[:1]]) == [True]
    dear = stop(slope=(9.0, 1.0, 1.0), row_price=(0, 0.4, 0))
    assert goes_on(dear, [GREEDY] * 2, [margins(math.log(3))] * 2, [mixed[:1], mixed[1:2]]) == [False, True]


def test_margins_and_sources_are_read_from_the_slot():
    slots = Slots(2, 10, 4)
    memory = np.arange(20, dtype=np.float32)
    slots.set(1, draft_margins=memory.ctypes.data)
    slots.draft_sources[1, 6] = native.BY_SUFFIX
    assert pending_margins(slots.array[1], 5, 3).tolist() == [5, 6, 7]
    assert pending_margins(slots.array[1], 5, 0).size == 0
    assert pending_sources(slots.array[1], 5, 3).tolist() == [native.BY_MODEL, native.BY_SUFFIX, native.BY_MODEL]
    slots.set(1, draft_sources=0)
    assert pending_sources(slots.array[1], 5, 3).size == 0


def test_the_native_survival_of_pending_drafts_is_the_references():
    rule = stop(slope=(1.0, 0.5, 2.0), intercept=(0.25, -0.5, 0.0))
    slots = Slots(3, 4, 3)
    kept = np.random.default_rng(3).normal(size=(3, 64)).astype(np.float32)
    slots.draft_sources[1, 5:8] = 0, 1, 0
    for slot, mode in enumerate((GREEDY, GREEDY, SEEDED)):
        slots.set(slot, mode=mode, draft_margins=kept[slot].ctypes.data)
    known, pending = np.array([4, 5, 6], np.int32), np.array([0, 3, 2], np.int32)
    order, out = np.array([0, 1, 2], np.int32), np.zeros(3)
    native_stop = NativeStop(3)
    pending_survival(native_stop.address(rule, 3), slots.array, order, known, pending, out)
    wanted = [
        survival(rule, int(entry["mode"]), pending_margins(entry, n, count), pending_sources(entry, n, count))
        for entry, n, count in zip(slots.array, known.tolist(), pending.tolist(), strict=True)
    ]
    assert out.tolist() == wanted
    slots.array[2]["draft_margins"] = 0
    with pytest.raises(InvalidArgumentError, match="reading the pending drafts of 3 requests failed"):
        pending_survival(native_stop.address(rule, 3), slots.array, order, known, pending, out)
