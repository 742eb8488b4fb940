"""The family of worst requests: no input of the model `faser` is left out, and every two limits meet."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bystander.attack import Sent
from benchmarks.bystander.canary import Heard
from benchmarks.bystander.cases import BASE, Case, all_cases, at_limits, beyond, covering, in_pairs, large
from benchmarks.bystander.rule import Delay, Outcome
from benchmarks.bystander.worst import MAX_BODY_BYTES, WRITTEN, worst_of
from faser_trtllm.core.request_field import rows
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.triton.contract import FASER, INPUTS, MAX_LISTS
from faser_trtllm.serving.triton.request import parse_request
from tests.serving.bystander.inputs import tensors_of

ROWS = rows(TextRequest)


@pytest.mark.parametrize("name", INPUTS)
def test_every_input_has_worst_values(name):
    """A new field fails here until benchmarks/bystander/worst.py has its limits."""
    worst = worst_of(name)
    assert any(name in fields for fields in (*worst.limits, *worst.beyond))


def test_only_inputs_are_written_down():
    assert WRITTEN.keys() <= INPUTS.keys()


def test_a_field_without_limits_is_named(monkeypatch):
    monkeypatch.setattr("benchmarks.bystander.worst.INPUTS", {**INPUTS, "new_field": "BYTES"})
    with pytest.raises(KeyError, match="the worst values of new_field are not written down"):
        worst_of("new_field")


def is_refused(fields, batch=1):
    """Return True if the checks that need neither tokenizer nor engine refuse the request."""
    try:
        for part in parse_request(tensors_of(Case("", fields, batch=batch)), FASER):
            part.request.validate()
            part.request.guide()
            SamplingParams(**part.request.sampling_fields()).validate(4096)
    except InvalidArgumentError:
        return True
    return False


CHECKED = [row for row in ROWS if row.bounds is not None or row.is_list or row.name == "cache_salt"]


@pytest.mark.parametrize("row", CHECKED, ids=lambda row: row.name)
def test_limits_are_taken_and_what_is_beyond_is_refused(row):
    worst = worst_of(row.name)
    assert [is_refused({**BASE, **fields}) for fields in worst.limits] == [False] * len(worst.limits)
    # Within its bounds, a value is beyond the server's own limit, or ends the request in the queue.
    fitting = [fields for fields in worst.beyond if row.bounds is None or not row.bounds.hold(fields[row.name])]
    fitting = [fields for fields in fitting if row.name != "max_tokens" or fields[row.name] < 2**31]
    assert [is_refused({**BASE, **fields}) for fields in (*fitting, *worst.large)] == [True] * (
        len(fitting) + len(worst.large)
    )


def test_the_family_is_large_and_its_names_differ():
    cases = all_cases()
    assert len(cases) >= 100
    assert len({case.name for case in cases}) == len(cases)
    assert {case.transport for case in cases} == {"http", "grpc"}
    assert max(case.num_sequences for case in at_limits()) == 64
    assert max(case.batch for case in in_pairs()) == MAX_LISTS
    assert max(case.batch for case in cases) == 64
    assert max(len(case.body()) for case in large() if case.batch == 1) > MAX_BODY_BYTES * 3 // 4
    assert {name for name in INPUTS for _ in worst_of(name).beyond} == {case.name.split()[0] for case in beyond()}


def test_pairs_of_limits_are_within_the_limits():
    """A refusal for one input would hide what the other one does."""
    assert [case.name for case in in_pairs() if is_refused(case.fields, case.batch)] == []


def test_every_two_limits_meet_in_a_request():
    cases = [case.fields for case in in_pairs()]
    for one, other in itertools.combinations(("bad_words", "stop_words", "return_log_probs", "cache_salt", "seed"), 2):
        assert any(one in fields and other in fields for fields in cases), (one, other)


@given(st.lists(st.integers(1, 5), min_size=2, max_size=7), st.integers(0, 9))
def test_a_covering_holds_every_pair_of_levels(sizes, seed):
    rows_ = covering([range(size) for size in sizes], seed)
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows_} == set(itertools.product(range(sizes[a]), range(sizes[b])))
    assert len(rows_) <= max(x * y for x, y in itertools.combinations(sorted(sizes)[-2:], 2)) * len(sizes)


def test_a_plain_request_is_the_work_without_the_rest():
    case = Case("x", {**BASE, "num_return_sequences": 4, "bad_words": ["a"], "return_log_probs": True}, batch=3)
    plain = case.plain()
    assert plain.num_sequences == case.num_sequences == 12
    assert plain.fields.keys() - BASE.keys() == {"num_return_sequences", "cache_salt"}
    assert json.loads(plain.body())["text_input"] == BASE["text_input"]


def outcome(heard, alone, trouble=""):
    quick = (5.0,) * 99
    return Outcome(Case("x", BASE), Sent(1), Heard(quick, (*quick, *heard)), Heard(quick, (*quick, *alone)), trouble)


@pytest.mark.parametrize(
    ("heard", "alone", "is_kept"),
    [
        ((90.0, 90.0), (5.0,), True),
        ((150.0, 150.0), (5.0,), False),
        ((290.0, 290.0), (150.0, 150.0), True),
        ((450.0,), (5.0,), True),  # one of a hundred
        ((600.0,), (5.0,), False),
        ((600.0,), (400.0,), True),  # this machine paused that long without the attack
    ],
)
def test_the_rule_compares_with_the_same_without_the_attack(heard, alone, is_kept):
    assert outcome(heard, alone).is_kept is is_kept
    assert not outcome(heard, alone, "the engine process was restarted").is_kept


def test_quantiles_of_few_waits():
    assert Delay.of(()) == Delay(0.0, 0.0)
    assert Delay.of((3.0,)) == Delay(3.0, 3.0)
    assert Delay.of(range(101)).p99 == 99.0
