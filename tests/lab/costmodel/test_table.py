"""A modeled table: the model's times in the project's format, for simulations only."""

import json

import pytest

from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from lab.costmodel.gpu import GPUS
from lab.costmodel.pair import HostTimes, Pair
from lab.costmodel.shape import SHAPES
from lab.costmodel.table import ExitSignal, modeled_table

PAIR = Pair(GPUS["h100"], SHAPES["llama-3.1-8b"], SHAPES["llama-3.2-1b"])


@pytest.fixture(scope="module")
def table():
    return modeled_table(PAIR, exit_signal=ExitSignal())


@pytest.mark.parametrize("gpu", GPUS)
def test_the_table_says_what_the_model_says(gpu):
    pair = Pair(GPUS[gpu], PAIR.target.shape, PAIR.draft.shape)
    table = modeled_table(pair)
    for n, b, c in ((1, 1, 512), (8, 8, 1024), (40, 8, 1024), (64, 64, 1024), (160, 32, 2048), (384, 64, 1024)):
        assert table.verify_ms(n, b, c) == pytest.approx(pair.verify_ms(n, b, c), rel=0.06)
        on_fewer = pair.verify_ms(n, b, c, 1.0 - pair.draft_share)
        assert table.verify_ms(n, b, c, "verify") == pytest.approx(on_fewer, rel=0.06)
    for b, c in ((1, 512), (16, 1024), (64, 1024), (256, 1024)):
        assert table.draft_step_ms(b, c) == pytest.approx(pair.draft_step_ms(b, c), rel=0.08)


def test_segments_and_their_boundary_cost_more_than_the_pass(table):
    whole = table.verify_ms(64, 16, 1024)
    parts = table.segment_ms(0, 64, 16, 1024) + table.segment_ms(1, 64, 16, 1024)
    assert whole < parts < 1.01 * whole
    assert table.exit_ms(1, 48) == pytest.approx(HostTimes().boundary_ms, rel=0.1)


def test_an_exit_that_doubts_makes_acceptance_less_likely_by_bayes():
    """A draft with even odds is doubted: accepted with 0.03 against rejected with 0.4."""
    model = ExitSignal(recall=0.4, false=0.03).model(1)
    assert model.intercept + model.rank == pytest.approx(-2.5903, abs=1e-3)  # log(0.03 / 0.4)
    assert model.intercept == pytest.approx(0.4804, abs=1e-3)  # log(0.97 / 0.6)


def test_it_says_that_it_is_modeled_and_how_far_off(table):
    again = CostTable.from_json(json.loads(json.dumps(table.to_json())))
    assert again == table
    assert again.source == "modeled"
    assert "aiconfigurator-core 0.12.0" in again.anchors
    assert again.held_out_errors["verify"] == 0.10


def test_serving_refuses_it(table, tmp_path):
    table.save(tmp_path / "profile.json")
    with pytest.raises(ConfigError, match=r"profile\.json is modeled .* `faser profile`"):
        CostTable.load(tmp_path / "profile.json", table.fingerprint)


def test_a_measured_table_of_before_is_still_served(table, tmp_path):
    data = {key: value for key, value in table.to_json().items() if key not in ("source", "anchors", "traffic")}
    (tmp_path / "profile.json").write_text(json.dumps(data))
    assert CostTable.load(tmp_path / "profile.json", table.fingerprint).source == "measured"


def test_a_draft_call_costs_the_host_once():
    steps = [PAIR.drafting_ms(length, 8, 1024) for length in (0, 1, 2, 3)]
    assert steps[0] == 0.0
    assert steps[3] - steps[2] == pytest.approx(steps[2] - steps[1]) == pytest.approx(PAIR.draft_step_ms(8, 1024))
    assert steps[1] > PAIR.draft_step_ms(8, 1024) + HostTimes().draft_call_ms


def test_a_block_drafter_pays_for_a_block_at_once_and_draws_the_rest():
    pair = Pair(GPUS["h100"], PAIR.target.shape, PAIR.target.shape.block_drafter())
    one, four = pair.drafting_ms(1, 8, 1024), pair.drafting_ms(4, 8, 1024)
    assert four - one == pytest.approx(3 * HostTimes().draft_step_ms)
    assert one > 5 * 0.14 + pair.target.head_ms(1)  # five layers of 0.44 GB, and the target's LM head
    assert pair.drafting_ms(1, 64, 1024) > 2.5 * one  # 16 rows of each request
    table = modeled_table(pair, max_batch_size=64)
    assert table.has("draft_block")
    assert not table.has("draft_rows")
    for requests in (1, 8, 64):
        modeled = pair.draft_rows_ms(2 * requests, requests, 1024)
        assert table.draft_rows_ms(2 * requests, requests, 1024) == pytest.approx(modeled, rel=0.25)


def test_a_split_that_no_green_context_has_is_refused():
    with pytest.raises(InvalidArgumentError, match="draft_sms is 30"):
        Pair(GPUS["h100"], PAIR.target.shape, PAIR.draft.shape, draft_sms=30)
