"""Log probs and logits of output tokens: those of the target alone bit for bit, whatever the speculation."""

import contextlib
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.ops import log_probs
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.text.service import TextGenerator
from tests.support.effort import examples, pick
from tests.support.engine_dirs import make_engine_dir
from tests.support.executor_harness import Setup, run
from tests.support.random_setups import POLICIES
from tests.support.toy_engine import context_row

VOCAB = 5
PROMPTS = [[1, 2, 0], [4], [3, 3, 3, 1, 0, 2, 4, 1], [2, 0]]
ROUNDING = 2e-6  # of float32 probabilities and their logarithm, against float64


def expected_log_probs(logits, history, params):
    """log probs [vocab] in float64, by the documented rule."""
    x = logits.astype(np.float64)
    seen, counts = np.unique(history, return_counts=True)
    x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
    x[seen] -= params.presence_penalty + params.frequency_penalty * counts
    for token, value in params.logit_bias:
        x[token] += value
    for word in params.bad_words:
        x[list(word)] = -np.inf
    x /= params.temperature or 1.0
    if params.normalize_log_probs and params.top_k:
        x[np.argsort(-x)[params.top_k :]] = -np.inf
    with np.errstate(divide="ignore"):
        weights = np.exp(x - x.max())
        return np.log(weights / weights.sum())


def check_log_probs(setup, prompt, params, tokens, request):
    history = list(prompt)
    for token, log_prob in zip(tokens, request.output_log_probs, strict=True):
        logits = setup.target.table[context_row(history, len(history) - 1, VOCAB)]
        assert log_prob == pytest.approx(expected_log_probs(logits, history, params)[token], abs=ROUNDING)
        history.append(token)


KINDS = {
    "greedy": {},
    "greedy_hot": {"top_k": 1, "temperature": 0.5},
    "seeded": {"temperature": 0.7, "seed": 11, "top_k": 3},
    "seeded_edits": {
        "temperature": 1.5,
        "seed": 2**63,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "logit_bias": ((1, 0.5),),
        "bad_words": ((3,),),
    },
    "normalized": {"temperature": 1.1, "seed": 5, "top_k": 3, "normalize_log_probs": True},
    "ended": {"end_ids": (2,)},
}


def params_of(kind):
    return SamplingParams(max_tokens=24, return_log_probs=True, return_generation_logits=True, **KINDS[kind])


@functools.cache
def alone(kind, index):
    """Return tokens, and the request, of a prompt without speculation."""
    result = run(Setup(vocab_size=VOCAB, max_batch_size=1), [(PROMPTS[index], params_of(kind))])
    return result.tokens["0"], result.requests["0"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(25))
@given(data=st.data())
def test_log_probs_and_logits_are_those_of_the_target_alone(kind, data):
    params = params_of(kind)
    speculative = Setup(
        vocab_size=VOCAB,
        policy=data.draw(st.sampled_from(POLICIES)),
        max_batch_size=data.draw(st.sampled_from([1, 3, 8])),
        max_num_tokens=data.draw(st.sampled_from([8, 64])),
        tokens_per_block=4,
        num_blocks=data.draw(st.sampled_from([16, 128])),
        capacity=data.draw(st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])),
        policy_seed=data.draw(st.integers(0, 1000)),
    )
    requests = [(prompt, params) for prompt in PROMPTS]
    found = run(speculative, requests, [data.draw(st.integers(0, 6)) for _ in PROMPTS])
    for index, prompt in enumerate(PROMPTS):
        tokens, request = found.tokens[str(index)], found.requests[str(index)]
        plain_tokens, plain = alone(kind, index)
        assert tokens == plain_tokens
        assert request.output_log_probs == plain.output_log_probs
        assert np.array_equal(request.output_logits, plain.output_logits)
        check_log_probs(speculative, prompt, params, tokens, request)
        history = list(prompt)
        for token, row in zip(tokens, request.output_logits, strict=True):
            assert np.array_equal(row, speculative.target.table[context_row(history, len(history) - 1, VOCAB)])
            history.append(token)


@pytest.mark.parametrize("policy", [*pick([], ["fixed:3"]), "fixed:3:ping_pong", "price:prune=on"])
def test_sampled_tokens_without_a_seed_report_the_distribution_they_were_drawn_from(policy):
    setup = Setup(vocab_size=VOCAB, policy=policy, max_batch_size=4)
    params = SamplingParams(max_tokens=40, temperature=1.3, return_log_probs=True)
    result = run(setup, [(prompt, params) for prompt in PROMPTS])
    for index, prompt in enumerate(PROMPTS):
        check_log_probs(setup, prompt, params, result.tokens[str(index)], result.requests[str(index)])


def test_a_greedy_request_s_normalized_log_probs_are_zero():
    params = SamplingParams(max_tokens=10, return_log_probs=True, normalize_log_probs=True)
    result = run(Setup(vocab_size=VOCAB, policy="fixed:3"), [([1, 2], params)])
    assert result.requests["0"].output_log_probs.tolist() == [0.0] * 10


def test_requests_that_do_not_ask_pay_nothing(monkeypatch):
    """Beside one that asks: no distribution is computed for the others, and nothing is kept."""
    asked = []
    next_token_probs = log_probs.next_token_probs
    monkeypatch.setattr(log_probs, "next_token_probs", lambda *a: asked.append(a[3]) or next_token_probs(*a))
    asks = SamplingParams(max_tokens=12, return_log_probs=True)
    plain = SamplingParams(max_tokens=12)
    result = run(Setup(vocab_size=VOCAB, policy="fixed:3"), [([1, 2], plain), ([1, 2], asks), ([4], plain)])
    assert sorted(asked) == list(range(2, 14))
    for name in ("0", "2"):
        assert list(result.requests[name].output_log_probs) == result.requests[name].output_logits == []


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    options = {"max_batch_size": 4, "max_seq_len": 128, "max_draft_len": 4, "tokens_per_block": 16}
    return make_engine_dir(tmp_path_factory.mktemp("pair"), **options)


def generate(engine_dir, speculation, requests):
    """Final outputs of the requests, run as one batch."""
    finals = {}
    with contextlib.closing(open_executor(engine_dir, ExecutorConfig(speculation=speculation))) as executor:
        generator = TextGenerator(executor, Tokenizer.load(EngineDir.load(engine_dir).tokenizer_dir))
        for index, request in enumerate(requests):
            generator.submit(str(index), request, lambda output, index=index: finals.__setitem__(index, output))
        while executor.step():
            pass
    return finals


def test_real_engines_give_the_same_bits_with_and_without_speculation(engine_dir):
    kinds = [{}, {"temperature": 0.8, "seed": 3, "top_p": 0.9}, {"temperature": 1.0, "seed": 9, "stop_words": ("e",)}]
    requests = [
        TextRequest(
            text=text,
            max_tokens=30,
            end_ids=(),
            stream=False,
            return_log_probs=True,
            return_generation_logits=True,
            **kind,
        )
        for text, kind in zip(["hello world", "def f(x):", "abc abc"], kinds, strict=True)
    ]
    alone = [generate(engine_dir, "off", [request])[0] for request in requests]
    together = generate(engine_dir, "fixed:4", requests)
    for index, plain in enumerate(alone):
        found = together[index]
        assert found.token_ids == plain.token_ids
        assert found.log_probs == plain.log_probs
        assert found.logits == plain.logits
        assert len(found.log_probs) == len(found.token_ids)
        assert len(found.logits) == 4 * 320 * len(found.token_ids)
    assert together[0].statistics.num_accepted_tokens > 0
    logits = np.frombuffer(alone[0].logits, np.float32).reshape(-1, 320).astype(np.float64)
    expected = logits - logits.max(1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(1, keepdims=True))
    picked = expected[np.arange(len(logits)), alone[0].token_ids]
    assert np.allclose(alone[0].log_probs, picked, rtol=0, atol=ROUNDING)


def test_logits_that_would_be_too_large_are_refused_with_the_limit(engine_dir, monkeypatch):
    monkeypatch.setattr("faser_trtllm.serving.text.service.MAX_LOGITS_BYTES", 4 * 320 * 10)
    request = TextRequest(text="a", max_tokens=11, return_generation_logits=True)
    with pytest.raises(Exception, match="allowed are 12800; lower max_tokens to 10"):
        generate(engine_dir, "off", [request])
