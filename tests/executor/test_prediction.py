"""Predictions of the output: they change how many passes it takes, and no token of it."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import InvalidArgumentError
from tests.support.effort import examples
from tests.support.executor_harness import Setup, run
from tests.support.random_setups import VOCAB, prompts, setups

PROMPT = [1, 2, 3, 4]
MAX_TOKENS = 40


def ask(setup, prediction=(), prompt=PROMPT, **params):
    """Return tokens, and the request with its statistics."""
    found = run(setup, [(prompt, SamplingParams(**{"max_tokens": MAX_TOKENS} | params, prediction=prediction))])
    return found.tokens["0"], found.requests["0"]


@settings(max_examples=examples(120))
@given(setup=setups(), data=st.data())
def test_no_token_depends_on_a_prediction(setup, data):
    """Whoever drafts besides, under every policy, with preemption, and for predictions from right to hopeless."""
    requests, plain = [], Setup(vocab_size=VOCAB, table_seed=setup.table_seed, max_batch_size=1)
    expected = []
    for _ in range(data.draw(st.integers(1, 5))):
        seeded = {"temperature": 0.8, "seed": data.draw(st.integers(0, 9))}
        params = {"max_tokens": data.draw(st.integers(1, 25)), **data.draw(st.sampled_from([{}, seeded]))}
        prompt = data.draw(prompts)
        text, _ = ask(plain, prompt=prompt, **params)
        expected.append(text)
        guess = data.draw(st.sampled_from([text, text[::-1], text[len(text) // 3 :], [0, 1, 2], ()]))
        drafters = data.draw(st.sampled_from([None, (), ("model",)])) if "model" in setup.drafters else None
        requests.append((prompt, SamplingParams(**params, prediction=guess, drafters=drafters)))
    found = run(setup, requests, [data.draw(st.integers(0, 4)) for _ in requests])
    assert [found.tokens[str(index)] for index in range(len(requests))] == expected


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 0.8}])
@pytest.mark.parametrize("drafters", ["model", "suffix", "suffix,model"])
def test_a_perfect_prediction_takes_few_passes(drafters, sampling):
    """One for the prompt, then five tokens each: four drafts and the target's own token. Who draws without a seed draws
    other tokens than it predicted."""
    setup = Setup(vocab_size=50, policy="fixed:4", drafters=drafters, noise=9.0)
    text, alone = ask(setup, **sampling)
    same, request = ask(setup, text, **sampling)
    stats = request.stats
    if sampling.get("seed") is None and sampling:
        assert len(same) == MAX_TOKENS
        return
    assert same == text
    assert stats.num_steps <= 1 + -(-(MAX_TOKENS - 1) // 5) + 1 < alone.stats.num_steps
    assert stats.num_predicted > 0.7 * MAX_TOKENS
    assert stats.num_mispredicted == 0
    assert stats.num_predicted <= stats.num_accepted_tokens


def test_a_wrong_prediction_is_counted_and_soon_given_up():
    setup = Setup(vocab_size=50, policy="fixed:4", drafters="suffix")
    text, alone = ask(setup)
    wrong = [token for place, token in enumerate(text) for token in ([token] if place % 2 else [token, 49, 48])]
    same, request = ask(setup, wrong)
    assert same == text
    assert request.stats.num_mispredicted > 0
    assert request.stats.num_steps <= alone.stats.num_steps
    hopeless, request = ask(setup, [49] * 30)
    assert hopeless == text
    assert request.stats.num_predicted == 0
    assert request.stats.num_mispredicted < 30


@pytest.mark.parametrize("options", [{"num_draft_tokens": 0}, {}])
def test_without_speculation_a_prediction_means_nothing(options):
    setup = Setup(vocab_size=50, policy="fixed:4" if options else "off")
    text, _ = ask(setup)
    same, request = ask(setup, text, **options)
    assert same == text
    assert (request.stats.num_predicted, request.stats.num_mispredicted) == (0, 0)


def test_a_prediction_does_not_make_the_text_itself_a_source():
    """Where the request or the server names drafters without suffix, nothing else than the prediction is drafted."""
    repeats = [1, 2, 3] * 8
    for setup, drafters in (("suffix", ()), ("model", None), ("model", ("model",))):
        found = Setup(vocab_size=50, policy="fixed:4", drafters=setup, noise=9.0)
        _, request = ask(found, [49], repeats, drafters=drafters)
        assert not (request.draft_sources == 1).any()


def test_the_next_request_of_a_slot_has_a_prediction_of_its_own():
    setup = Setup(vocab_size=50, policy="fixed:4", noise=9.0, max_batch_size=1)
    asked = [(prompt, SamplingParams(max_tokens=MAX_TOKENS)) for prompt in (PROMPT, [9, 8, 7], [30, 31])]
    texts = [ask(setup, prompt=prompt)[0] for prompt, _ in asked]
    predicted = [
        (prompt, SamplingParams(max_tokens=MAX_TOKENS, prediction=text))
        for (prompt, _), text in zip(asked, texts, strict=True)
    ]
    found = run(setup, predicted)
    for index, text in enumerate(texts):
        assert found.tokens[str(index)] == text
        assert found.requests[str(index)].stats.num_predicted > 0.7 * MAX_TOKENS


@pytest.mark.parametrize(
    ("prediction", "token"), [((1, 50), 50), ([-1, 3], -1), (array("i", [2, 2**31 - 1]), 2**31 - 1)]
)
def test_a_prediction_with_tokens_that_the_model_lacks_is_refused(prediction, token):
    with pytest.raises(InvalidArgumentError) as caught:
        ask(Setup(vocab_size=50, policy="fixed:4"), prediction)
    assert str(caught.value) == f"prediction holds token id {token}, the vocabulary has ids 0 to 49"
