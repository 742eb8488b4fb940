"""Loads on synthetic engines: the real scheduler and policies, a table's time, a process's acceptance."""

from dataclasses import replace

import numpy as np
import pytest

from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.decision import DraftStop
from lab.clock import ManualClock
from lab.costmodel.gpu import GPUS
from lab.costmodel.pair import Pair
from lab.costmodel.shape import SHAPES
from lab.costmodel.table import ExitSignal, modeled_table
from lab.planner.load.acceptance import Acceptance
from lab.planner.load.arrivals import Arrival, generated_arrivals
from lab.planner.load.arrivals import Lengths as Tokens
from lab.planner.load.run import Objectives, run_arrivals, run_closed_loop
from lab.planner.load.service import ServiceOptions, open_service
from lab.planner.load.synthetic_engines import DoubtRates, stopped_drafts
from lab.reference.draft_stop import goes_on
from tests.support.effort import pick

pytestmark = pytest.mark.slow

PAIR = Pair(GPUS["h100"], SHAPES["llama-3.1-8b"], SHAPES["llama-3.2-1b"])
TOKENS = Tokens(200, 0.5, 60, 0.5)


@pytest.fixture(scope="module")
def table() -> CostTable:
    return modeled_table(PAIR, max_batch_size=64, exit_signal=ExitSignal())


def closed_loop(table, speculation, concurrency=8, acceptance=0.7, num_requests=None, **options):
    clock = ManualClock()
    service = ServiceOptions(
        speculation, table, Acceptance.of(acceptance), max_batch_size=64, max_output_len=256, **options
    )
    with open_service(service, clock) as executor:
        lengths = TOKENS.draw(np.random.default_rng(0), 512, 256)
        report = run_closed_loop(executor, clock, lengths, concurrency, num_requests or 6 * concurrency)
        executor.check_integrity()
        return report, executor.stats()


@pytest.mark.parametrize(
    "speculation",
    ["off", "schedule", "price:prune=on", "price:mode=ping_pong", *pick([], ["fixed:3", "price:mode=draft_ahead"])],
)
def test_every_policy_gives_every_token_and_repeats_itself(table, speculation):
    report, stats = closed_loop(table, speculation)
    again, _ = closed_loop(table, speculation)
    tokens = TOKENS.draw(np.random.default_rng(0), 512, 256)
    assert report.num_tokens == sum(next(tokens)[1] for _ in range(48))
    assert (report.end_s, report.num_steps) == (again.end_s, again.num_steps)
    assert report.num_requests == len(report.ttft_ms) == 48
    assert stats["num_running"] == stats["num_waiting"] == 0


def test_off_takes_the_tables_time_per_token(table):
    """Eight requests of some 250 tokens: 6.9 ms, the host's 0.25, and prompts between."""
    report, _ = closed_loop(table, "off")
    step_ms = table.decode_ms(8, 260) + table.overhead_ms
    assert step_ms < report.tpot_ms.percentile(0.5) < 1.1 * step_ms


def test_drafts_pass_as_often_as_was_asked(table):
    _, stats = closed_loop(table, "fixed:1", acceptance=0.59, num_requests=400, concurrency=32)
    rate = stats["num_accepted_tokens"] / stats["num_draft_tokens"]
    assert rate == pytest.approx(Acceptance.of(0.59).by_place[0], abs=0.03)


def test_speculation_pays_at_few_requests_and_long_drafts_cost_at_many(table):
    def gain(speculation, concurrency):
        return closed_loop(table, speculation, concurrency)[0].tokens_per_s / off[concurrency]

    off = {c: closed_loop(table, "off", c)[0].tokens_per_s for c in (1, 64)}
    assert gain("fixed:3", 1) > 1.3
    assert gain("fixed:8", 64) < 1.0
    assert gain("price:mode=serial,prune=off", 64) > 1.02


def test_pruning_drops_what_the_exit_doubts(table):
    _, stats = closed_loop(table, "price:mode=serial,prune=on", 32)
    _, none = closed_loop(table, "price:mode=serial,prune=off", 32)
    assert none["num_pruned_rows"] == 0
    assert stats["num_pruned_rows"] > 0.02 * stats["num_draft_tokens"]


def test_an_exits_doubts_are_those_that_its_model_was_made_of():
    found = DoubtRates.of(ExitSignal(recall=0.4, false=0.03).model(1))
    assert (found.recall, found.false) == pytest.approx((0.4, 0.03))


def test_requests_come_at_their_time_and_idle_time_is_skipped(table):
    clock = ManualClock()
    with open_service(ServiceOptions("off", table, Acceptance.of(0.7), max_batch_size=8), clock) as executor:
        arrivals = [Arrival(0.0, 10, 4), Arrival(100.0, 10, 4), Arrival(100.0, 10, 4)]
        report = run_arrivals(executor, clock, arrivals, Objectives(ttft_ms=1000.0, tpot_ms=0.001))
    assert 100.0 < report.end_s < 100.1
    assert report.busy_s < 0.1
    assert report.num_requests == 3
    assert report.goodput == 0.0  # nobody's tokens come within a microsecond
    assert report.ttft_ms.percentile(1.0) < 20.0


def test_goodput_is_a_band_as_wide_as_times_may_be_wrong(table):
    def goodput(tolerance):
        clock = ManualClock()
        with open_service(ServiceOptions("fixed:2", table, Acceptance.of(0.7), max_batch_size=8), clock) as executor:
            lengths = TOKENS.draw(np.random.default_rng(0), 512, 256)
            objectives = Objectives(tpot_ms=5.0, tolerance=tolerance)
            return run_closed_loop(executor, clock, lengths, 8, pick(60, 200), objectives)

    exact, loose = goodput(0.0), goodput(0.2)
    assert exact.goodput_band == (exact.goodput, exact.goodput)
    assert loose.goodput == exact.goodput
    low, high = loose.goodput_band
    assert 0.0 <= low < loose.goodput < high <= 1.0


def test_overload_waits_in_the_queue_and_misses_its_objectives(table):
    clock, done, duration_s = ManualClock(), [], pick(5.0, 10.0)
    service = ServiceOptions("fixed:2", table, Acceptance.of(0.7), max_batch_size=8, max_output_len=256)
    with open_service(service, clock) as executor:
        arrivals = generated_arrivals(TOKENS, 40.0, duration_s, 0, max_prompt=512, max_output=256)
        report = run_arrivals(executor, clock, arrivals, Objectives(ttft_ms=200.0), done.append)
    assert report.end_s > 1.2 * duration_s
    assert 0.0 < report.goodput < 0.7
    assert done[-1] == report.num_requests
    assert sum(report.tokens_by_minute) == report.num_tokens


def test_a_cache_that_is_too_small_for_all_admits_fewer(table):
    few, _ = closed_loop(table, "fixed:2", 32, kv_tokens=3000)
    many, _ = closed_loop(table, "fixed:2", 32)
    assert few.ttft_ms.percentile(0.9) > 3.0 * many.ttft_ms.percentile(0.9)
    assert few.num_tokens == many.num_tokens


def test_a_policy_that_believes_another_table_still_pays_by_the_true_one(table):
    dear = {key: replace(c, ms=tuple(1e3 for _ in c.ms)) for key, c in table.curves.items() if "draft" in key}
    believed = replace(table, curves=dict(table.curves) | dear)
    misled, _ = closed_loop(table, "schedule", believed=believed)
    informed, _ = closed_loop(table, "schedule")
    assert misled.tokens_per_s < 0.85 * informed.tokens_per_s  # it hardly drafts
    assert misled.end_s < 60.0  # a draft step of a second is in its head only


def test_drafting_stops_as_the_plain_rule_says():
    """Against ops/draft_stop.py, one step at a time."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, k = int(rng.integers(1, 6)), 5
        stop = DraftStop(
            rng.uniform(0.0, 1.0, (3, k)).astype(np.float32),
            rng.uniform(-1.0, 2.0, (3, k)).astype(np.float32),
            rng.uniform(0.3, 0.7, (3, k)).astype(np.float32),
            rng.uniform(0.0, 0.3, (3, k)).astype(np.float32),
            rng.uniform(0.0, 0.3, k).astype(np.float32),
            np.concatenate([[0.0], rng.uniform(0.0, 1.0, n)]).astype(np.float32),
        )
        modes = rng.integers(0, 3, n).astype(np.int32)
        pending = rng.integers(0, 3, n).astype(np.int32)
        wanted = rng.integers(0, k - pending + 1).astype(np.int32)
        margins = rng.uniform(0.0, 5.0, (n, k + 1)).astype(np.float32)
        expected = np.minimum(wanted, 1)
        going = [i for i in range(n) if wanted[i] > 1]
        while going:
            behind = [margins[i, : pending[i] + expected[i]] for i in going]
            decided = goes_on(stop, [int(modes[i]) for i in going], behind)
            going = [i for i, on in zip(going, decided, strict=True) if on]
            for i in going:
                expected[i] += 1
            going = [i for i in going if expected[i] < wanted[i]]
        assert stopped_drafts(stop, margins, modes, pending, wanted).tolist() == expected.tolist()
