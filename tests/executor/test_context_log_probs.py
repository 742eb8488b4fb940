"""Log probs of prompts, and the most probable tokens beside log probs: those of the target alone bit for bit, whatever
the speculation, the chunks and the cache."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights
from tests.support.checkpoints import make_pair
from tests.support.effort import examples
from tests.support.executor_harness import Collector, Setup, run
from tests.support.random_setups import VOCAB, prompts, setups
from tests.support.toy_engine import context_row, make_table

ROUNDING = 2e-6  # of float32 probabilities and their logarithm, against float64
SAMPLING = [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.7, "seed": 4, "top_k": 2, "repetition_penalty": 1.3}]


def expected_context(table, prompt):
    """log probs [len(prompt) - 1, vocab] in float64."""
    rows = [context_row(prompt, place, table.shape[1]) for place in range(len(prompt) - 1)]
    logits = table[rows].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def as_lists(tops):
    return [(ids.tolist(), logs.tolist()) for ids, logs in tops]


def kept(request):
    return (
        request.output_log_probs,
        as_lists(request.output_tops),
        request.context_log_probs,
        as_lists(request.context_tops),
    )


@settings(max_examples=examples(60))
@given(setup=setups(), data=st.data())
def test_they_are_those_of_the_target_alone(setup, data):
    requests = []
    for _ in range(data.draw(st.integers(1, 6))):
        asks = data.draw(st.sampled_from([(True, False), (True, True), (False, True), (False, False)]))
        params = SamplingParams(
            max_tokens=data.draw(st.integers(1, 20)),
            return_context_log_probs=asks[0],
            return_log_probs=asks[1],
            num_top_log_probs=data.draw(st.sampled_from([0, 1, 3, 20])) if any(asks) else 0,
            **data.draw(st.sampled_from(SAMPLING)),
        )
        requests.append((data.draw(prompts), params))
    arrivals = [data.draw(st.integers(0, 8)) for _ in requests]
    result = run(setup, requests, arrivals)
    plain = Setup(vocab_size=VOCAB, table_seed=setup.table_seed, max_batch_size=1)
    for index, (prompt, params) in enumerate(requests):
        found, alone = result.requests[str(index)], run(plain, [(prompt, params)])
        assert result.tokens[str(index)] == alone.tokens["0"]
        assert kept(found) == kept(alone.requests["0"])
        assert len(found.output_log_probs) == params.return_log_probs * len(result.tokens[str(index)])
        if not params.return_context_log_probs:
            assert list(found.context_log_probs) == found.context_tops == []
            continue
        expected = expected_context(plain.target.table, prompt)
        picked = expected[np.arange(len(prompt) - 1), prompt[1:]]
        assert np.allclose(found.context_log_probs, picked, rtol=0, atol=ROUNDING)
        assert len(found.context_log_probs) == len(found.context_tops) == len(prompt) - 1
        for (ids, logs), token, log_prob, row in zip(
            found.context_tops, prompt[1:], found.context_log_probs, expected, strict=True
        ):
            assert ids.tolist() == np.argsort(-row)[: params.num_top_log_probs].tolist()
            assert np.allclose(logs, row[ids], rtol=0, atol=ROUNDING)
            assert token not in ids or logs[ids.tolist().index(token)] == log_prob


@pytest.mark.parametrize("policy", ["off", "fixed:3", "price:prune=on"])
def test_a_text_s_are_the_same_bits_whether_it_was_generated_or_sent(policy):
    setup = Setup(policy=policy, max_num_tokens=8)
    prompt = [1, 2, 0]
    params = SamplingParams(max_tokens=30, return_log_probs=True, num_top_log_probs=2)
    generated = run(setup, [(prompt, params)])
    text = prompt + generated.tokens["0"]
    params = SamplingParams(max_tokens=1, return_context_log_probs=True, num_top_log_probs=2)
    sent = run(setup, [(text, params)]).requests["0"]
    assert sent.context_log_probs[2:] == generated.requests["0"].output_log_probs
    assert as_lists(sent.context_tops[2:]) == as_lists(generated.requests["0"].output_tops)
    assert len(sent.context_log_probs) == len(text) - 1


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        ("fixed:3", {"num_branches": 3, "noise": 2.0}),
        ("price:prune=on", {}),
        ("erratic", {"policy_seed": 3}),
        ("erratic", {"policy_seed": 5, "drafters": "suffix,model"}),
        ("fixed:4:draft_ahead", {"drafters": "head"}),
    ],
)
def test_a_prompt_that_takes_many_passes_beside_drafts(policy, fields):
    """The rows of logits that are sampled are not where they are otherwise, nor where they were before
    pruning."""
    asks = SamplingParams(max_tokens=9, return_context_log_probs=True, return_log_probs=True, num_top_log_probs=2)
    long = [place * place % 5 for place in range(50)]
    requests = [([4, 4], SamplingParams(max_tokens=60)), (long, asks), ([1, 2], SamplingParams(max_tokens=60))]
    setup = Setup(policy=policy, max_batch_size=3, max_num_tokens=32, max_logit_rows=15, **fields)
    result = run(setup, requests, [0, 3, 1])
    assert len(result.requests["1"].context_log_probs) == 49
    for index, request in enumerate(requests):
        alone = run(Setup(max_batch_size=1), [request])
        assert result.tokens[str(index)] == alone.tokens["0"]
        assert kept(result.requests[str(index)]) == kept(alone.requests["0"])


def test_a_prompt_that_was_preempted_goes_on_where_its_log_probs_end():
    """The prompt fills the cache in small pieces, and then the older request needs a block."""
    asks = SamplingParams(max_tokens=2, return_context_log_probs=True)
    long = [place * place % 5 for place in range(48)]
    requests = [([4, 4], SamplingParams(max_tokens=40)), (long, asks)]
    setup = Setup(capacity="MAX_UTILIZATION", max_batch_size=2, max_num_tokens=3, num_blocks=16, chunk_unit_size=1)
    result = run(setup, requests, [0, 2])
    paused = result.requests["1"]
    assert paused.stats.num_preemptions == 1
    assert kept(paused) == kept(run(Setup(), [requests[1]]).requests["0"])
    assert len(paused.context_log_probs) == 47


def test_a_prompt_in_the_cache_is_computed_again_for_who_asks_only():
    prompt = [1, 2, 0, 3] * 6
    asks = SamplingParams(max_tokens=4, return_context_log_probs=True)
    plain = SamplingParams(max_tokens=4)
    result = run(Setup(max_num_tokens=8), [(prompt, plain), (prompt, asks), (prompt, plain)], [0, 20, 40])
    cached = [result.requests[name].stats.num_cached_tokens for name in "012"]
    assert cached == [0, 0, 20]
    assert len(result.requests["1"].context_log_probs) == 23
    assert len(set(map(tuple, result.tokens.values()))) == 1


@pytest.mark.parametrize("chunked", [True, False])
def test_a_prompt_is_cut_to_the_rows_of_logits_that_a_pass_has(chunked):
    """The engine fails for more; without chunking the others still run whole."""
    prompts = [[1, 2, 0, 3] * 5, [4, 4, 1] * 6]
    asks = SamplingParams(max_tokens=4, return_context_log_probs=True)
    setup = Setup(max_logit_rows=8, chunked=chunked)
    result = run(setup, [(prompts[0], asks), (prompts[1], SamplingParams(max_tokens=4))])
    assert setup.target.num_forwards == 3 + 3  # 8, 8 and 4 rows of the prompt, then three tokens
    assert len(result.requests["0"].context_log_probs) == 19


def test_a_prompt_whose_logits_are_not_numbers_ends_with_an_error():
    """At its second token; the KV of a toy engine goes on."""
    table = make_table(VOCAB, 0)
    prompt = [1, 2, 3, 4, 1]
    table[context_row(prompt, 1, VOCAB)] = np.nan
    setup = Setup(tables=(table, table), max_num_tokens=8, max_logit_rows=8)
    asks = SamplingParams(max_tokens=4, return_context_log_probs=True)
    result = run(setup, [(prompt, asks), (prompt, SamplingParams(max_tokens=4))])
    assert result.reasons == {"0": "error", "1": "length"}
    assert "NaN" in result.requests["0"].error


def test_tokens_that_float32_says_are_impossible_have_log_probs_in_order():
    """In the reference that a sampled distribution is, e^-80 is 0; a text that has such a token has a log prob."""
    table = np.zeros((VOCAB**3, VOCAB), np.float32)
    table[:] = [-30.0, 50.0, -40.0, -20.0, -35.0]
    setup = Setup(tables=(table, table))
    asks = SamplingParams(max_tokens=2, return_context_log_probs=True, return_log_probs=True, num_top_log_probs=4)
    request = run(setup, [([1, 2, 3], asks)]).requests["0"]
    assert request.context_log_probs == pytest.approx([-90.0, -70.0], abs=1e-4)
    for ids, logs in (*request.context_tops, *request.output_tops):
        assert ids.tolist() == [1, 3, 0, 4]
        assert logs.tolist() == pytest.approx([0.0, -70.0, -80.0, -85.0], abs=1e-4)


BF16_ERROR = 0.1  # the largest of a logit (tests/builder/test_cpu_parity.py); log probs of two differ no more


def test_real_engines_say_what_the_reference_does_in_the_same_bits_however_they_run(tmp_path):
    """Chunks, drafts, and whether a token was sent or generated; against torch within the error of bf16."""
    target, draft = make_pair(tmp_path)
    build_engines(BuildOptions(target, draft, tmp_path / "engine", max_batch_size=2, max_seq_len=128, max_draft_len=4))
    prompt = np.random.default_rng(0).integers(2, 320, 90).tolist()
    fields = {"return_log_probs": True, "return_context_log_probs": True, "num_top_log_probs": 5}

    def generate(prompt, speculation, max_num_tokens):
        config = ExecutorConfig(speculation=speculation, max_num_tokens=max_num_tokens)
        collector = Collector()
        with open_executor(tmp_path / "engine", config) as executor:
            for name in "01":
                executor.submit(name, prompt, SamplingParams(max_tokens=20, **fields), collector.sink(name))
            while executor.step():
                pass
        assert kept(collector.requests["0"]) == kept(collector.requests["1"])
        return collector.tokens["0"], collector.requests["0"], executor.stats()

    tokens, request, _ = generate(prompt, "off", 128)
    for speculation, max_num_tokens in itertools.product(("off", "fixed:4"), (11, 128)):
        found = generate(prompt, speculation, max_num_tokens)
        assert (found[0], kept(found[1])) == (tokens, kept(request))
    assert found[2]["num_accepted_tokens"] > 0
    _, sent, _ = generate(prompt + tokens[:-1], "off", 128)
    assert sent.context_log_probs == request.context_log_probs + request.output_log_probs[:-1]
    assert as_lists(sent.context_tops) == as_lists(request.context_tops + request.output_tops[:-1])

    reference = ReferenceModel(load_model_config(target), CheckpointWeights(target))
    expected = reference.logits(prompt).log_softmax(-1)[:-1].numpy()
    picked = expected[np.arange(len(prompt) - 1), prompt[1:]]
    assert np.abs(request.context_log_probs - picked).max() < BF16_ERROR
    for row, (ids, logs) in zip(expected, request.context_tops, strict=True):
        assert np.abs(np.sort(row)[::-1][:5] - logs).max() < BF16_ERROR
        assert np.abs(row[ids] - logs).max() < BF16_ERROR


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_top_log_probs": 21, "return_log_probs": True}, "num_top_log_probs is 21, allowed is 0 to 20"),
        ({"num_top_log_probs": -1, "return_log_probs": True}, "num_top_log_probs is -1, allowed is 0 to 20"),
        ({"num_top_log_probs": 2}, "num_top_log_probs is 2 without log probs"),
    ],
)
def test_numbers_that_are_refused(fields, message):
    with Setup().open() as executor, pytest.raises(InvalidArgumentError, match=message):
        executor.submit("0", [1], SamplingParams(**fields), lambda output: False)
