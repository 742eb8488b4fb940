"""The price with a block drafter in a simulated world: one pass whatever the length, then a little per draft."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from faser_trtllm.policy.base import StepView
from faser_trtllm.policy.price import PricePolicy
from faser_trtllm.policy.registry import make_policy
from tests.policy.world import World, constant, cost_table, request
from tests.support.effort import pick

pytestmark = pytest.mark.slow

NUM_PLACES = 15


class Costs:
    """ms of a target pass by rows, and of a block pass and a further draft by requests."""

    def __init__(self, target, block, draft):
        self.target, self.block, self.draft = target, block, draft

    def table(self):
        return cost_table(self.target, self.draft, self.block)


def gpu_ms(rows):
    return 5.0 + 0.01 * rows + 0.03 * max(0, rows - 96)


def cpu_ms(rows):
    return 4.0 + 1.0 * rows


COSTS = {
    "gpu": Costs(gpu_ms, lambda n: 0.5 + 0.01 * n, lambda n: 0.04 + 0.001 * n),
    "gpu, dear block": Costs(gpu_ms, lambda n: 2.0 + 0.04 * n, lambda n: 0.04 + 0.001 * n),
    "gpu, dear head": Costs(gpu_ms, lambda n: 0.5 + 0.01 * n, lambda n: 0.35 + 0.01 * n),
    "cpu": Costs(cpu_ms, lambda n: 0.5 + 0.5 * n, lambda n: 0.02 + 0.05 * n),
    "cpu, dear block": Costs(cpu_ms, lambda n: 1.0 + 2.5 * n, lambda n: 0.02 + 0.05 * n),
    "cpu, dear head": Costs(cpu_ms, lambda n: 0.5 + 0.5 * n, lambda n: 0.1 + 0.3 * n),
}


class Text:
    """Places of the text are hard or easy, whoever drafts there; drafts get worse with their place in the block, and
    margins tell some of it."""

    def __init__(self, ease):
        self._ease = ease
        self._rng = np.random.default_rng(7)
        self._places = {}

    def __call__(self, rng, index, place):
        drafted = self.world.requests[index]
        hard, luck = self._of(drafted.request_id)
        position = drafted.num_tokens + place
        log_odds = self._ease - 0.12 * place + 1.5 * hard[position]
        margin = max(0.0, log_odds + 2.0 + rng.standard_normal())
        return margin, float(luck[position] < 1.0 / (1.0 + np.exp(-log_odds)))

    def _of(self, name):
        if name not in self._places:
            hard, shocks = np.zeros(5100), self._rng.standard_normal(5100)
            for i in range(1, hard.size):
                hard[i] = 0.7 * hard[i - 1] + 0.71 * shocks[i]
            self._places[name] = hard, self._rng.random(5100)
        return self._places[name]


def world_of(policy, batch_size, costs, acceptance):
    sizes = {"max_draft_len": NUM_PLACES, "noise": 0.03}
    world = World(policy, batch_size, acceptance, target=costs.target, draft=costs.draft, block=costs.block, **sizes)
    if isinstance(acceptance, Text):
        acceptance.world = world
    return world


def goodput(spelling, batch_size, costs, ease, num_steps, num_before=20):
    policy = make_policy(spelling, NUM_PLACES, costs.table(), 32)
    world = world_of(policy, batch_size, costs, Text(ease))
    world.run(num_before)
    return world.run(num_steps), world


SOME = [("gpu", 1), ("gpu, dear block", 8), ("gpu, dear head", 8), ("cpu", 1), ("cpu, dear block", 8)]
LENGTHS = pick([2, 5, 8, 12], [1, 2, 3, 4, 5, 6, 8, 10, 12, 15])


@pytest.mark.parametrize("ease", pick([1.6], [0.6, 1.6, 2.6]))
@pytest.mark.parametrize(("name", "batch_size"), pick(SOME, [*product(COSTS, (1, 8)), ("gpu", 32)]))
def test_no_length_of_all_blocks_is_better(name, batch_size, ease):
    costs, num_steps = COSTS[name], max(400, 3000 // batch_size)
    price, _ = goodput("price", batch_size, costs, ease, num_steps, num_before=max(400, 2000 // batch_size))
    fixed = {k: goodput(f"fixed:{k}", batch_size, costs, ease, num_steps)[0] for k in LENGTHS}
    fixed[0] = goodput("off", batch_size, costs, ease, num_steps)[0]
    assert price > 0.98 * max(fixed.values()), fixed


def test_a_cheap_draft_is_made_on_suspicion_and_a_dear_one_is_not():
    """Beyond the rows that are run, where a margin may turn out well."""
    lengths = {}
    for name in ("gpu", "gpu, dear head"):
        _, world = goodput("price", 32, COSTS[name], 1.6, 200, num_before=200)
        drafted, verified = (
            np.mean(list(map(sum, each[-100:]))) for each in (world.drafted_lengths, world.verified_lengths)
        )
        lengths[name] = drafted / verified
    assert lengths["gpu"] > 1.15 * lengths["gpu, dear head"]


def test_a_block_is_drafted_in_one_go():
    """All its drafts are computed at once, so nothing ends a call; a chain of draft steps does end."""
    costs = COSTS["gpu"]
    for table, stops in ((costs.table(), False), (cost_table(costs.target, costs.draft), True)):
        policy = PricePolicy(NUM_PLACES, table, 32)
        decision = policy.plan(StepView([request("a", NUM_PLACES)], 0, 0, 0.0))
        assert any(decision.lengths)
        assert (decision.stop is not None) == stops


def test_what_the_pass_over_blocks_costs_is_learnt():
    """It takes twenty times what the table says, so nothing is drafted."""
    told, true = COSTS["gpu"], Costs(gpu_ms, lambda n: 20.0 * (0.5 + 0.01 * n), COSTS["gpu"].draft)
    world = world_of(PricePolicy(NUM_PLACES, told.table(), 32), 4, true, constant(0.4))
    world.run(1500)
    assert sum(map(sum, world.drafted_lengths[-500:])) < 0.1 * 500


def test_a_fixed_length_drafts_when_nothing_is_pending():
    _, world = goodput("fixed:5", 4, COSTS["gpu"], 1.6, 300)
    assert {n for lengths in world.drafted_lengths for n in lengths} == {5}
