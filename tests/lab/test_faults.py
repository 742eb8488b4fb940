"""FASER_FAULT: how it is spelled, and that each fault does what its name says."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import ConfigError
from faser_trtllm.serving.launch.faults import fault_wrapper
from lab.faults import (
    DRAFT_KINDS,
    TARGET_KINDS,
    TIMED_KINDS,
    Fault,
    parse_faults,
    with_faults,
)
from tests.support.executor_harness import Setup, run
from tests.support.random_setups import greedy_reference


def test_without_the_variable_an_engine_is_left_as_it_is(monkeypatch):
    engine = object()
    for value in ("", " "):
        monkeypatch.setenv("FASER_FAULT", value)
        assert fault_wrapper()(engine, "draft") is engine
    assert with_faults(engine, "draft", ()) is engine
    assert with_faults(engine, "draft", parse_faults("target_nan@step3")) is engine


def test_the_variable_wraps_the_engines_that_its_faults_concern(monkeypatch):
    engine = object()
    monkeypatch.setenv("FASER_FAULT", "draft_error@step5")
    wrap = fault_wrapper()
    assert wrap(engine, "target") is engine
    assert wrap(engine, "draft") is not engine


def test_a_list_of_faults():
    assert parse_faults("draft_error@step5, draft_slow@step7+:200ms,engine_hang@step1:30s") == (
        Fault("draft_error", 5),
        Fault("draft_slow", 7, goes_on=True, seconds=0.2),
        Fault("engine_hang", 1, seconds=30.0),
    )


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("draft_eror@step5", "has the kind 'draft_eror', known are draft_error, draft_oom, draft_nan, draft_slow, "),
        ("draft_error", r"has 'draft_error', which is not of the form draft_error@step5 "),
        ("draft_error@5", "not of the form draft_error@step5 "),
        ("draft_error@step0", "not of the form"),
        ("draft_error@step5:1s", "not of the form draft_error@step5 "),
        ("draft_slow@step5", "not of the form draft_slow@step5:200ms"),
        ("draft_error@step5,,draft_oom@step6", "has the kind ''"),
    ],
)
def test_a_wrong_spec_is_refused_in_a_sentence(spec, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        parse_faults(spec)
    assert "FASER_FAULT" in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40) | st.from_regex(r"[a-z_]{1,12}@step[0-9]{1,3}\+?(:[0-9]{1,3}m?s)?", fullmatch=True))
@example("draft_slow@step5:99999999s")
def test_any_text_is_parsed_or_refused(text):
    try:
        faults = parse_faults(text)
    except ConfigError:
        return
    for fault in faults:
        assert fault.kind in (*DRAFT_KINDS, *TARGET_KINDS)
        assert fault.step >= 1
        assert (fault.seconds > 0) <= (fault.kind in TIMED_KINDS)


def test_nan_of_the_target_fails_the_first_request_of_that_pass_only():
    setup = Setup(policy="fixed:3", faults="target_nan@step3")
    requests = [([1, 2], SamplingParams(max_tokens=30)), ([4, 3], SamplingParams(max_tokens=30))]
    result = run(setup, requests)
    assert result.reasons == {"0": "error", "1": "length"}
    assert "NaN" in result.requests["0"].error
    assert result.tokens["1"] == greedy_reference(setup.target.table, [4, 3], 30)
