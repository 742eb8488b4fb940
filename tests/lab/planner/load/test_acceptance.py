"""The acceptance process has the shape that it is asked for, and is the same whoever drafts."""

import numpy as np
import pytest

from faser_trtllm.errors import InvalidArgumentError
from lab.planner.load.acceptance import PUBLISHED, Acceptance, AcceptanceProcess, mean_of_tested

PLACES = np.arange(5)[None]
SLOT = np.zeros(1, np.int32)


def by_place(acceptance, num_requests=6000):
    """Acceptance given those before, of one step of five drafts per request."""
    process = AcceptanceProcess(acceptance, 1, 8, 5, seed=3)
    tested, accepted = np.zeros(5), np.zeros(5)
    for number in range(num_requests):
        process.begin(0, number, 8)
        passes = process.draft(SLOT, PLACES, PLACES)[1][0]
        count = int(np.cumprod(passes).sum())
        tested[: count + 1] += 1
        accepted[:count] += 1
    return accepted / tested


def test_acceptance_by_place_is_as_published():
    assert by_place(Acceptance(PUBLISHED)) == pytest.approx(PUBLISHED, abs=0.03)


@pytest.mark.parametrize("mean", [0.3, 0.59, 0.8])
def test_a_mean_is_that_of_the_drafts_that_are_tested(mean):
    acceptance = Acceptance.of(mean)
    assert mean_of_tested(acceptance.by_place) == pytest.approx(mean, abs=1e-6)
    assert acceptance.by_place[4] > acceptance.by_place[0]


def test_requests_differ_and_a_small_concentration_makes_them_differ_more():
    def spread(concentration):
        process = AcceptanceProcess(Acceptance((0.6,), concentration), 1, 400, 1, seed=0)
        positions = np.arange(400)[None]
        rates = []
        for number in range(300):
            process.begin(0, number, 400)
            rates.append(process.draft(SLOT, positions, 0 * positions)[1].mean())
        return float(np.std(rates))

    # Of a Beta: sqrt(0.24 / (concentration + 1)), and the draws'.
    assert spread(20.0) == pytest.approx(np.hypot(0.107, 0.024), abs=0.015)
    assert spread(3.0) == pytest.approx(np.hypot(0.245, 0.022), abs=0.03)


def test_confidence_tells_what_passes():
    """The log-odds are calibrated: among drafts with odds of about 3 to 1, three in four pass."""
    process = AcceptanceProcess(Acceptance((0.6,)), 1, 4000, 1, seed=0)
    odds, passes = [], []
    for number in range(30):
        process.begin(0, number, 4000)
        found = process.draft(SLOT, np.arange(4000)[None], np.zeros((1, 4000), np.int64))
        odds.append(found[0][0])
        passes.append(found[1][0])
    odds, passes = np.concatenate(odds), np.concatenate(passes)
    near = np.abs(odds - np.log(3.0)) < 0.3
    assert near.sum() > 2000
    assert passes[near].mean() == pytest.approx(0.75, abs=0.03)


def test_a_position_is_the_same_whenever_and_wherever_it_is_drafted():
    process = AcceptanceProcess(Acceptance.of(0.7), 4, 64, 8, seed=9)
    process.begin(2, 17, 64)
    whole = process.draft(np.array([2], np.int32), np.arange(20)[None], np.zeros((1, 20), np.int64))
    process.begin(0, 17, 64)
    alone = process.draft(SLOT, np.array([[13]]), np.zeros((1, 1), np.int64))
    assert (alone[0][0, 0], alone[1][0, 0]) == (whole[0][0, 13], whole[1][0, 13])
    process.begin(0, 18, 64)
    assert process.draft(SLOT, np.array([[13]]), np.zeros((1, 1), np.int64))[0][0, 0] != alone[0][0, 0]


def test_a_file_gives_acceptance_by_place(tmp_path):
    (tmp_path / "a.json").write_text('{"by_place": [0.8, 0.7], "concentration": 5}')
    assert Acceptance.load(tmp_path / "a.json") == Acceptance((0.8, 0.7), 5)


@pytest.mark.parametrize(
    "text",
    ["{}", "[0.7]", '{"by_place": [1.7]}', '{"by_place": [0.7], "shape": 1}', '{"by_place": [0.7', '{"by_place": []}'],
)
def test_a_file_without_it_is_refused_in_a_sentence(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match="acceptance") as caught:
        Acceptance.load(tmp_path / "a.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mean", [0.0, 1.0, -3, 1.5])
def test_a_mean_that_is_no_chance_is_refused(mean):
    with pytest.raises(InvalidArgumentError, match=f"acceptance is {mean}"):
        Acceptance.of(mean)
