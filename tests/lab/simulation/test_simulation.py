"""Simulation: the real executor and engines, a table's time; a run repeats itself to the token and microsecond."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from benchmarks.policies.simulation import open_simulation
from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.core.cost_table import CostSample, CostTable, Fingerprint, Interference
from faser_trtllm.core.decision import Decision, Mode
from faser_trtllm.core.plan import DraftResult, ScheduledRequests, SchedulerOutput
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import ConfigError
from faser_trtllm.fingerprint import PROFILE, fingerprint_of
from lab.clock import ManualClock
from lab.costmodel.traffic import Traffic, Work
from lab.simulation.draft_worker import SimulatedDraftWorker
from lab.simulation.priced_engine import PricedEngine, RunningDraft
from lab.simulation.routed_engine import RoutedEngine
from lab.simulation.router import SyntheticRouter
from tests.support.checkpoints import make_pair
from tests.support.columns import columns
from tests.support.executor_harness import Collector, Setup, toy_costs

PARTITIONS = ("all", "draft", "verify")


def toy_batch(block_table, lengths):
    """The first rows of as many requests, lengths[i] of request i."""
    builder = BatchBuilder(block_table)
    for slot, length in enumerate(lengths):
        builder.add(slot, np.ones(64, np.int32), 0, length, 1)
    return builder.build()


@pytest.fixture
def priced():
    setup = Setup(policy="fixed:2")
    setup.open()
    clock = ManualClock()
    return PricedEngine(setup.target, toy_costs(), clock), clock


_HERE = Fingerprint("toy", "toy", 1, "toy")


def _least():
    """Samples without which there is no table."""
    return [CostSample(kind, n, n, 16, 1.0) for kind in ("verify", "draft_step") for n in (1, 2)]


def block_table():
    return np.arange(8 * 16, dtype=np.int32).reshape(8, 16)


def test_a_pass_takes_the_tables_time(priced):
    engine, clock = priced
    engine.forward(toy_batch(block_table(), [3, 5]))
    assert 1e3 * clock.now_s() == pytest.approx(toy_costs().verify_ms(8, 2, 3.0))
    engine.partition = "verify"
    engine.forward(toy_batch(block_table(), [3, 5]))
    assert 1e3 * clock.now_s() == pytest.approx(
        toy_costs().verify_ms(8, 2, 3.0) + toy_costs().verify_ms(8, 2, 3.0, "verify")
    )


def test_a_pass_after_a_pass_takes_less_than_one_after_drafting():
    setup = Setup(policy="fixed:2")
    setup.open()
    decode = [CostSample("decode", n, n, 16, 0.25) for n in (1, 2, 4)]
    curves = dict(toy_costs().curves) | {"decode@all": CostTable.fit(_least() + decode, _HERE).curves["decode@all"]}
    table, clock = replace(toy_costs(), curves=curves), ManualClock()
    target, draft = PricedEngine(setup.target, table, clock), PricedEngine(setup.draft, table, clock)
    target.draft_engine = draft
    pass_ms = []
    for drafted in (False, True, False):
        if drafted:
            draft._take(1.0)
        start_s = clock.now_s()
        target.forward(toy_batch(block_table(), [1, 1]))
        pass_ms.append(1e3 * (clock.now_s() - start_s))
    assert pass_ms == pytest.approx([0.25, table.verify_ms(2, 2, 1.0), 0.25])


def test_segments_take_their_own_time_and_a_pruned_row_stops_costing(priced):
    engine, clock = priced
    batch = toy_batch(block_table(), [3, 5])
    engine.run_segment(batch, 0)
    first = clock.now_s()
    assert 1e3 * first == pytest.approx(toy_costs().segment_ms(0, 8, 2, 3.0))
    engine.compact_rows(np.array([0, 1, 2], np.int32))
    engine.run_segment(toy_batch(block_table(), [3]), 1)
    assert 1e3 * (clock.now_s() - first) == pytest.approx(toy_costs().segment_ms(1, 3, 1, 2.0))


def test_the_experts_of_rows_that_were_dropped_stop_costing():
    """An engine's count is the mean over the layers of the pass so far; each segment costs its own."""
    setup = Setup(policy="fixed:2")
    setup.open()
    curves = {key: replace(curve, per_expert_ms=0.01) for key, curve in toy_costs().curves.items()}
    routing = Routing(64, 4)
    router, clock = SyntheticRouter(routing, 8, 16), ManualClock()
    costs = replace(toy_costs(), curves=curves, routing=routing)
    engine = PricedEngine(RoutedEngine(setup.target, router), costs, clock)
    before, after = toy_batch(block_table(), [3, 5]), toy_batch(block_table(), [3])
    many, few = (
        router.distinct(np.repeat(batch.slots, np.diff(batch.cu_rows)), batch.positions) for batch in (before, after)
    )
    assert few < 0.6 * many
    engine.run_segment(before, 0)
    first = clock.now_s()
    assert 1e3 * first == pytest.approx(toy_costs().segment_ms(0, 8, 2, 3.0) + 0.01 * many)
    engine.compact_rows(np.array([0, 1, 2], np.int32))
    engine.run_segment(after, 1)
    assert 1e3 * (clock.now_s() - first) == pytest.approx(toy_costs().segment_ms(1, 3, 1, 2.0) + 0.01 * few)


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("sim")
    build_engines(
        BuildOptions(*make_pair(root / "pair", num_layers=2), root / "engines", max_batch_size=4, max_seq_len=64)
    )
    fingerprint = fingerprint_of(root / "engines", 1)
    table = toy_costs()
    curves = {key: curve for key, curve in table.curves.items() if not key.startswith("segment")}
    CostTable(fingerprint, curves, overhead_ms=0.05).save(root / "engines" / PROFILE)
    return root / "engines"


@pytest.fixture(scope="module")
def twins_dir(tmp_path_factory, engine_dir):
    """The draft is the target, so that all drafts are accepted."""
    root = tmp_path_factory.mktemp("twins")
    target, _ = make_pair(root / "pair", num_layers=2)
    build_engines(BuildOptions(target, target, root / "engines", max_batch_size=4, max_seq_len=64))
    table = CostTable.load(engine_dir / PROFILE, fingerprint_of(engine_dir, 1))
    replace(table, fingerprint=fingerprint_of(root / "engines", 1)).save(root / "engines" / PROFILE)
    return root / "engines"


def simulate(engine_dir, speculation, believed=None):
    table = CostTable.load(engine_dir / PROFILE, fingerprint_of(engine_dir, 1))
    clock, collector = ManualClock(), Collector()
    config = ExecutorConfig(speculation=speculation, num_threads=1)
    ends = {}
    with open_simulation(engine_dir, config, table, clock, believed=believed) as executor:
        for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5]), ("c", [6])):
            executor.submit(name, prompt, SamplingParams(max_tokens=24), collector.sink(name))
        steps = 0
        while executor.step():
            steps += 1
            ends |= {name: clock.now_s() for name in collector.reasons if name not in ends}
    return collector.tokens, ends, steps


@pytest.mark.parametrize("speculation", ["off", "fixed:3", "schedule", "price:mode=serial,prune=off"])
def test_runs_repeat_themselves_exactly(engine_dir, speculation):
    assert simulate(engine_dir, speculation) == simulate(engine_dir, speculation)


def test_tokens_are_real_and_time_is_the_tables(engine_dir):
    tokens, ends, steps = simulate(engine_dir, "off")
    drafted, drafted_ends, _ = simulate(engine_dir, "fixed:3")
    assert drafted == tokens
    assert ends != drafted_ends
    # 23 steps of three rows and one prefill of six, and the overhead of each step.
    table = toy_costs()
    assert steps == 24
    expected_ms = 24 * 0.05 + table.verify_ms(6, 3, 2.0) + sum(table.verify_ms(3, 3, 3.0 + i) for i in range(23))
    assert 1e3 * ends["a"] == pytest.approx(expected_ms, rel=0.05)


def test_time_follows_the_costs_whatever_the_policy_believes(engine_dir):
    """A policy that takes drafts for dear does not draft."""
    table = CostTable.load(engine_dir / PROFILE, fingerprint_of(engine_dir, 1))
    dear = {key: replace(c, ms=tuple(1e3 for _ in c.ms)) for key, c in table.curves.items() if "draft" in key}
    believed = replace(table, curves=dict(table.curves) | dear)
    assert simulate(engine_dir, "fixed:3", believed) == simulate(engine_dir, "fixed:3")
    tokens, ends, _ = simulate(engine_dir, "schedule", believed)
    assert tokens == simulate(engine_dir, "schedule")[0]
    assert ends == simulate(engine_dir, "off")[1]
    assert ends != simulate(engine_dir, "schedule")[1]


def test_a_table_of_other_segments_is_refused(engine_dir):
    with pytest.raises(ConfigError, match="has 2 segments, the target engine 1; build it with"):
        open_simulation(engine_dir, ExecutorConfig(speculation="off", num_threads=1), toy_costs(), ManualClock())


@pytest.mark.parametrize("mode", ["draft_ahead", "ping_pong"])
def test_streams_that_overlap_take_the_longer_ones_time(engine_dir, mode):
    """The same tokens; a step takes what its slower stream takes, on the streams' partitions, slowed by the other."""
    plain, _, _ = simulate(engine_dir, "off")
    tokens, ends, _ = simulate(engine_dir, f"price:mode={mode},prune=off")
    assert tokens == plain
    assert simulate(engine_dir, f"price:mode={mode},prune=off") == (tokens, ends, _)


def test_a_step_of_two_streams_ends_with_the_later_one():
    clock = ManualClock(1.0)
    table = toy_costs()
    table = CostTable(table.fingerprint, table.curves, (Interference("draft", "verify", 1.5, 1.25),))
    engines = {role: PricedEngine(Setup(policy="fixed:2").tables, table, clock) for role in ("target", "draft")}

    class Stage:
        def draft(self, plan):
            engines["draft"]._take(4.0)
            return DraftResult(*columns([], []))

    worker = SimulatedDraftWorker(Stage(), engines, table, clock, lambda plan: 0.0)
    # 2 ms take 2.5 beside the draft, of whose 4 ms 1.67 are then done; of 8 ms 4.8 are done when 4 took 6.
    for verify_ms, expected_ms in ((2.0, 2.5 + 4.0 - 2.5 / 1.5), (8.0, 6.0 + 8.0 - 6.0 / 1.25)):
        start_s = clock.now_s()
        drafting = worker.draft(SchedulerOutput(ScheduledRequests.of([]), None, Decision([], mode=Mode.DRAFT_AHEAD)))
        assert clock.now_s() == pytest.approx(start_s)
        assert engines["target"].partition == "verify"
        engines["target"]._take(verify_ms)
        drafting.result()
        assert 1e3 * (clock.now_s() - start_s) == pytest.approx(expected_ms)
    worker.draft(SchedulerOutput(ScheduledRequests.of([]), None, Decision([]))).result()
    assert (engines["draft"].partition, engines["target"].concurrent) == ("all", None)


def test_streams_slow_each_other_by_what_they_draw_from_memory():
    """A draft of 4 ms and a pass of 8, until the draft ends; alone, each draws half of the bandwidth."""
    traffic = Traffic({"target": 1.2, "draft": 0.1}, {"target": 0.0, "draft": 0.0}, dict.fromkeys(PARTITIONS, 2.0))
    clock, table = ManualClock(), replace(toy_costs(), traffic=asdict(traffic))
    rest = RunningDraft(Work(4.0, 4.0), table)
    taken_ms = rest.run(Work(8.0, 8.0))
    draft_factor, verify_factor = 1.0 / (1.0 - 0.55 * 0.5), 1.0 / (1.0 - 0.3 * 0.5)
    assert taken_ms == pytest.approx(4.0 * draft_factor + 8.0 - 4.0 * draft_factor / verify_factor)
    assert rest.rest.ms == 0.0
    assert rest.run(Work(8.0, 12.0)) == 8.0
    setup = Setup(policy="fixed:2")
    setup.open()
    engine = PricedEngine(setup.target, table, clock)
    engine.concurrent = RunningDraft(Work(100.0, 0.0), table)
    engine.partition = "verify"
    alone_ms = table.verify_ms(8, 2, 3.0, "verify")
    engine.forward(toy_batch(block_table(), [3, 5]))
    assert alone_ms <= 1e3 * clock.now_s() < 1.04 * alone_ms  # the other draws nothing


def test_a_segment_on_a_stream_takes_as_much_longer_as_the_pass(priced):
    engine, clock = priced
    engine.partition = "verify"
    engine.run_segment(toy_batch(block_table(), [3, 5]), 0)
    assert 1e3 * clock.now_s() == pytest.approx(1.2 * toy_costs().segment_ms(0, 8, 2, 3.0))


@pytest.mark.parametrize("mode", ["ping_pong", "draft_ahead"])
def test_overlap_that_breaks_its_promise_is_given_up(twins_dir, mode):
    """The policy believes that streams do not slow each other; in truth each makes the other six times as slow."""
    table = CostTable.load(twins_dir / PROFILE, fingerprint_of(twins_dir, 1))
    draft = {key: replace(c, ms=tuple(3.0 * ms for ms in c.ms)) for key, c in table.curves.items() if "draft" in key}
    streams = {"verify@verify": replace(table.curves["verify@all"]), "draft_step@draft": draft["draft_step@all"]}
    streams["draft_rows@draft"] = draft["draft_rows@all"]
    table = replace(table, curves=dict(table.curves) | draft | streams)
    believed = replace(table, interference=(Interference("draft", "verify", 1.0, 1.0),))
    costs = replace(table, interference=(Interference("draft", "verify", 6.0, 6.0),))
    shares = []
    clock, collector = ManualClock(), Collector()
    config = ExecutorConfig(speculation="price:mode=auto,prune=off", num_threads=1)
    with open_simulation(twins_dir, config, costs, clock, believed=believed) as executor:
        for part in range(3):  # each ends with batches of few requests, for which streams are tried by themselves
            for i in range(150):
                name = f"{part}-{i}"
                executor.submit(name, [1 + i % 7, 2], SamplingParams(max_tokens=40), collector.sink(name))
            before = executor.stats()
            while executor.step():
                pass
            after = executor.stats()
            steps = after["num_steps"] - before["num_steps"]
            shares.append((after[f"num_steps_{mode}"] - before[f"num_steps_{mode}"]) / steps)
    assert shares[0] > 0.0, shares
    assert shares[-1] < 0.1, shares
