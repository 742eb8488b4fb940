"""The host's time per step, by number of requests, with and without drafts."""

import pytest

from faser_trtllm.policy.overheads import DRAFTING, Overheads


def test_what_is_not_known_is_taken_from_what_is():
    overheads = Overheads(0.1)
    assert overheads.ms(4, False) == 0.1
    assert overheads.ms(4, True) == pytest.approx(DRAFTING * 0.1)
    overheads.learn(8, False, 0.2)
    assert overheads.ms(1, False) == 0.2
    assert overheads.ms(1, True) == pytest.approx(DRAFTING * 0.2)
    overheads.learn(1, True, 0.06)
    assert overheads.ms(16, True) == 0.06


def test_sizes_are_told_apart():
    overheads = Overheads(0.1)
    for _ in range(50):
        for num_requests in (1, 4, 16):
            for is_drafting in (False, True):
                overheads.learn(num_requests, is_drafting, (0.03 + 0.01 * num_requests) * (1.8 if is_drafting else 1.0))
    assert [overheads.ms(n, False) for n in (1, 4, 16)] == pytest.approx([0.04, 0.07, 0.19])
    assert [overheads.ms(n, True) for n in (1, 4, 16)] == pytest.approx([0.072, 0.126, 0.342])


def test_only_a_change_of_note_is_news():
    overheads = Overheads(0.1)
    assert overheads.learn(4, False, 0.05)
    assert not any(overheads.learn(4, False, ms) for ms in (0.052, 0.049, 0.051) * 10)
    assert [overheads.learn(4, False, 0.08) for _ in range(80)].count(True) > 1
    assert overheads.ms(4, False) == pytest.approx(0.08, rel=0.1)
