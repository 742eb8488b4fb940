"""Synthetic acceptance in the executor: the mean that was asked for, marks on all that it touches, nothing when off."""

from __future__ import annotations

import logging

import pytest

from faser_trtllm.config import ExecutorConfig, parse
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import ConfigError
from faser_trtllm.sampling.rejection import CpuRejectionSampler
from faser_trtllm.serving.text.finish_reason import read_finish, spell_finish
from faser_trtllm.trtllm.convert.synthetic import FORCED_ACCEPTANCE, with_forced_acceptance
from tests.support.executor_harness import Setup, run

PROMPTS = [([i % 5, (3 * i) % 5, i // 5], SamplingParams(max_tokens=40)) for i in range(24)]


def measure(monkeypatch: pytest.MonkeyPatch, acceptance, policy="fixed:4", prompts=PROMPTS, **setup):
    """Return tokens by request, and the executor's statistics."""
    made = []
    with_config(monkeypatch, made, synthetic_acceptance=acceptance)
    result = run(Setup(policy=policy, max_num_tokens=64, **setup), prompts, num_clients=1)
    (executor,) = made
    return result, executor.stats()


def with_config(monkeypatch, made, **fields):
    from tests.support import executor_harness as harness

    real = harness.assemble

    def assemble(target, draft, policy, config, **rest):
        made.append(real(target, draft, policy, config.model_copy(update=fields), **rest))
        return made[-1]

    monkeypatch.setattr(harness, "assemble", assemble)


@pytest.mark.parametrize("acceptance", [0.0, 1.0, 2.5, (0.8, 0.5, 0.5, 0.0)])
def test_the_mean_that_is_asked_for_is_what_is_accepted(monkeypatch, acceptance):
    prompts = [(prompt, SamplingParams(max_tokens=50)) for prompt, _ in PROMPTS]
    result, stats = measure(monkeypatch, acceptance, "fixed:4", prompts, noise=3.0, tokens_per_block=16)
    assert all(len(tokens) == 50 for tokens in result.tokens.values())
    expected = 0.8 + 0.8 * 0.5 + 0.8 * 0.25 if isinstance(acceptance, tuple) else acceptance
    full = stats["num_drafts"]  # frontiers with drafts; the last of a request may be shorter
    assert stats["num_accepted_tokens"] / full == pytest.approx(expected, abs=0.12)
    assert stats["synthetic_acceptance"] == 1.0


def test_outputs_are_reproducible_and_not_the_targets(monkeypatch):
    first, _ = measure(monkeypatch, 2.5, noise=3.0)
    monkeypatch.undo()
    again, _ = measure(monkeypatch, 2.5, noise=3.0, max_batch_size=3)
    monkeypatch.undo()
    exact, _ = measure(monkeypatch, None, noise=3.0)
    assert first.tokens == again.tokens
    assert first.tokens != exact.tokens
    assert all(request.stats.is_synthetic for request in first.requests.values())


def test_the_text_is_the_targets_where_no_draft_is_accepted(monkeypatch):
    prompts = [
        (prompt, SamplingParams(max_tokens=20, temperature=0.9 if i % 2 else None, seed=i if i % 2 else None))
        for i, (prompt, _) in enumerate(PROMPTS)
    ]
    forced, stats = measure(monkeypatch, 0.0, "erratic", prompts)
    monkeypatch.undo()
    assert forced.tokens == run(Setup(policy="off"), prompts).tokens
    assert stats["num_draft_tokens"] > stats["num_accepted_tokens"] == 0


def test_off_is_the_very_same_path(monkeypatch):
    seen = []
    real = CpuRejectionSampler.sample
    monkeypatch.setattr(CpuRejectionSampler, "sample", lambda self, *rest: seen.append(type(self)) or real(self, *rest))
    off, stats = measure(monkeypatch, None)
    monkeypatch.undo()
    assert run(Setup(policy="off"), PROMPTS).tokens == off.tokens
    assert "synthetic_acceptance" not in stats
    assert not any(request.stats.is_synthetic for request in off.requests.values())
    assert set(seen) == {CpuRejectionSampler}


def test_it_runs_with_pruning_carried_drafts_preemption_sampling_and_log_probs(monkeypatch):
    prompts = [
        (prompt, SamplingParams(max_tokens=30, temperature=0.9 if i % 2 else None, seed=i if i % 3 else None))
        for i, (prompt, _) in enumerate(PROMPTS)
    ]
    prompts += [([1, 2], SamplingParams(max_tokens=9, return_log_probs=True, normalize_log_probs=True))]
    result, _ = measure(
        monkeypatch, (0.9, 0.6, 0.5), "erratic", prompts, capacity="MAX_UTILIZATION", num_blocks=24, max_batch_size=4
    )
    assert all(reason == "length" for reason in result.reasons.values())
    assert [len(tokens) for tokens in result.tokens.values()] == [30] * len(PROMPTS) + [9]
    assert len(result.requests[str(len(PROMPTS))].output_log_probs) == 9


def test_the_start_is_warned_of(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        measure(monkeypatch, 1.0, prompts=PROMPTS[:1])
    assert "OUTPUTS ARE NOT THE TARGET'S" in caplog.text


def test_finish_reasons_are_marked_and_read():
    assert spell_finish("length", False) == "length"
    assert spell_finish("length", True) == "length; synthetic_acceptance"
    for marked in (False, True):
        assert read_finish(spell_finish("stop", marked)) == ("stop", marked)


@pytest.mark.parametrize("value", [-1, "x", True, [1.5], [0.5, -0.1], float("nan"), float("inf"), [[0.5]]])
def test_wrong_values_are_refused(value):
    with pytest.raises(ConfigError, match=r"synthetic_acceptance is .* a number of at least 0, or a list of numbers"):
        parse(ExecutorConfig, {"synthetic_acceptance": value})


def test_the_variable_of_tensorrt_llm_is_taken_unless_the_configuration_says_something():
    config = ExecutorConfig()
    assert with_forced_acceptance(config, {}).synthetic_acceptance is None
    assert with_forced_acceptance(config, {FORCED_ACCEPTANCE: "0"}).synthetic_acceptance is None
    assert with_forced_acceptance(config, {FORCED_ACCEPTANCE: " 2.5"}).synthetic_acceptance == 2.5
    own = parse(ExecutorConfig, {"synthetic_acceptance": [0.5, 0.25]})
    assert with_forced_acceptance(own, {FORCED_ACCEPTANCE: "2.5"}).synthetic_acceptance == (0.5, 0.25)
    for wrong in ("many", "-1", "nan"):
        with pytest.raises(ConfigError, match=f"{FORCED_ACCEPTANCE} is '{wrong}'; it must be a number"):
            with_forced_acceptance(config, {FORCED_ACCEPTANCE: wrong})
