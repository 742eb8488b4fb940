"""Text over a fake executor: what a request becomes, and what its tokens become."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.core.request import FinishReason
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.text.service import TextGenerator
from tests.support.checkpoints import write_tokenizer
from tests.support.effort import examples
from tests.support.scripted_text import ScriptExecutor, cut, joined, run
from tests.support.sentencepiece import sentencepiece_backend


@pytest.mark.parametrize("prompt", [{"text": "the"}, {"text": None, "token_ids": True}])
@pytest.mark.parametrize("metaspace", [False, True])
def test_the_space_between_prompt_and_answer_is_kept(metaspace, prompt):
    """Llama 2's and Mistral's tokenizers drop the space that begins a text, and the answer does not begin one."""
    tokenizer = Tokenizer(sentencepiece_backend(metaspace).to_str())
    chunks = [[token] for token in tokenizer.encode("inner the", add_special_tokens=False)]
    if "token_ids" in prompt:
        prompt = prompt | {"token_ids": tuple(tokenizer.encode("the", add_special_tokens=False))}
    outputs, _ = run(tokenizer, chunks, stream=False, **prompt)
    assert outputs[-1].text == "the inner the"
    assert joined(run(tokenizer, chunks, stream=True, **prompt)[0])[0] == " inner the"


def test_special_tokens_are_in_the_text_where_that_is_asked_for(tokenizer):
    ids = [*tokenizer.encode("a"), 1, *tokenizer.encode("b")]
    name = tokenizer.token(1)
    for asked, text in ((True, "ab"), (False, f"a{name}b")):
        for chunks in ([ids], [[token] for token in ids]):
            assert joined(run(tokenizer, chunks, skip_special_tokens=asked)[0])[:2] == (text, ids)
    (cut, *_) = joined(run(tokenizer, [ids], skip_special_tokens=False, stop_words=(name[2:],))[0])
    assert cut == f"a{name[:2]}"


PIECES = ["a", "b", "ab", "ba", " ", "é", "😀", "\n"]


@settings(max_examples=examples(150))
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=15).map("".join),
    words=st.lists(st.sampled_from(["ab", "ba ", "é", "😀b", "\n\n", "bab", "a"]), max_size=3),
    sizes=st.lists(st.integers(1, 4), max_size=20),
    min_tokens=st.integers(0, 4),
)
def test_any_chunking_gives_the_same_answer(tokenizer, text, words, sizes, min_tokens):
    ids = tokenizer.encode(text)
    fields = {"stop_words": tuple(words), "min_tokens": min_tokens}
    whole = joined(run(tokenizer, [ids], **fields)[0])
    assert joined(run(tokenizer, cut(ids, sizes), **fields)[0]) == whole
    aggregated, _ = run(tokenizer, cut(ids, sizes), **fields, stream=False, exclude_input_in_output=True)
    assert len(aggregated) == 1
    assert joined(aggregated) == whole
    if not min_tokens:
        assert not any(word in whole[0] for word in words)
        assert whole[2] == ("stop" if any(word in text for word in words) else "length")
    assert tokenizer.decode(ids).startswith(whole[0])


@pytest.mark.parametrize("stream_interval", [1, 3])
def test_is_draft_marks_the_accepted_drafts_of_every_step(tokenizer, stream_interval):
    executor, outputs = ScriptExecutor(), []
    request = TextRequest(text="hello", max_tokens=50, stream=True, detokenize=False, return_is_draft=True)
    TextGenerator(executor, tokenizer, stream_interval).submit("r", request, outputs.append)
    steps = [([5, 6, 7], 2), ([8], 0), ([9, 10], 2), ([11, 12], 4)]  # the last was cut at an end token
    for new, num_accepted in steps:
        executor.request.stats.num_accepted_tokens += num_accepted
        executor.sink(RequestOutput(executor.request, tuple(new)))
    executor.sink(RequestOutput(executor.request, (), FinishReason.LENGTH))
    marked = [pair for o in outputs for pair in zip(o.token_ids, o.is_draft, strict=True)]
    assert [token for token, is_draft in marked if is_draft] == [5, 6, 9, 10, 11, 12]
    assert [token for token, is_draft in marked if not is_draft] == [7, 8]


def test_is_draft_is_left_out_unless_asked_for(tokenizer):
    outputs, _ = run(tokenizer, [[5, 6], [7]])
    assert all(output.is_draft == () for output in outputs)


def test_tokens_cut_off_by_a_stop_word_are_not_marked(tokenizer):
    executor, outputs = ScriptExecutor(), []
    request = TextRequest(text="hello", max_tokens=50, stop_words=("END",), return_is_draft=True)
    TextGenerator(executor, tokenizer).submit("r", request, outputs.append)
    ids = tokenizer.encode("one END two")
    executor.request.stats.num_accepted_tokens = len(ids) - 1
    assert executor.sink(RequestOutput(executor.request, tuple(ids)))
    assert [len(output.is_draft) for output in outputs] == [len(output.token_ids) for output in outputs]
    assert len(outputs[-1].token_ids) < len(ids)


def test_stop_word_across_chunks_is_not_output_and_is_never_shown(tokenizer):
    ids = tokenizer.encode("one END two")
    outputs, stopped = run(tokenizer, [[i] for i in ids], stop_words=("END",))
    assert stopped
    assert joined(outputs)[0] == "one "
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].statistics.num_output_tokens == len(joined(outputs)[1])


def test_held_text_comes_out_when_the_word_does_not_complete(tokenizer):
    ids = tokenizer.encode("one EN")
    outputs, stopped = run(tokenizer, [[i] for i in ids], stop_words=("END",))
    assert not stopped
    assert joined(outputs) == ("one EN", ids, "length")


@pytest.mark.parametrize("interval", [1, 2, 3, 50])
def test_a_stream_answers_every_so_many_steps_the_first_and_last_at_once(tokenizer, interval):
    chunks = [[65 + i, 66 + i] for i in range(10)]
    each, _ = run(tokenizer, chunks, stream=True)
    outputs, _ = run(tokenizer, chunks, stream=True, stream_interval=interval)
    assert joined(outputs) == joined(each)
    sizes = [len(output.token_ids) for output in outputs]
    assert sizes[0] == 2
    assert all(size == 2 * interval for size in sizes[1:-1])
    assert sum(sizes) == 20
    assert len(outputs) == 1 + 9 // interval + 1
    assert [output.is_final for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_non_streaming_answer_has_the_prompt_unless_excluded(tokenizer):
    ids = tokenizer.encode(" world")
    assert joined(run(tokenizer, [ids], stream=False)[0])[0] == "hello world"
    assert joined(run(tokenizer, [ids], stream=False, exclude_input_in_output=True)[0])[0] == " world"
    assert joined(run(tokenizer, [ids])[0])[0] == " world"
    prompt = tuple(tokenizer.encode("hello"))
    assert joined(run(tokenizer, [ids], text=None, token_ids=prompt, stream=False)[0])[0] == "hello world"


def test_errors_and_timeouts_are_sentences(tokenizer):
    executor = ScriptExecutor()
    outputs = []
    TextGenerator(executor, tokenizer).submit("r", TextRequest(text="a", timeout_ms=50), outputs.append)
    assert executor.timeout_s == 0.05
    executor.sink(RequestOutput(executor.request, (), FinishReason.TIMEOUT))
    assert "in the queue" in str(outputs[-1].error)
    assert "50" in str(outputs[-1].error)
    executor.request.error = "the target's logits are not finite"
    executor.sink(RequestOutput(executor.request, (), FinishReason.ERROR))
    assert str(outputs[-1].error) == "the target's logits are not finite"


def params_of(tokenizer, **fields) -> SamplingParams:
    executor = ScriptExecutor()
    TextGenerator(executor, tokenizer).submit("r", TextRequest(text="a", **fields), print)
    return executor.request.params


def test_sampling_params(tokenizer):
    assert params_of(tokenizer).end_ids == tuple(tokenizer.eos_token_ids)
    assert params_of(tokenizer, end_ids=()).end_ids == ()
    assert params_of(tokenizer, num_draft_tokens=0).num_draft_tokens == 0
    assert params_of(tokenizer, drafters="suffix, model").drafters == ("suffix", "model")
    banned = params_of(tokenizer, bad_words=("ab", "")).bad_words
    assert set(banned) == {tuple(tokenizer.encode("ab")), tuple(tokenizer.encode(" ab"))}
    bias = params_of(tokenizer, embedding_bias_words=("aa",), embedding_bias_weights=(0.5,)).logit_bias
    assert dict(bias) == {i: 0.5 * tokenizer.encode("aa").count(i) for i in tokenizer.encode("aa")}


def test_max_tokens_is_cut_at_the_longest_sequence_and_min_tokens_with_it(tokenizer):
    for max_tokens in (512, 513, 2**31 - 1):
        params = params_of(tokenizer, max_tokens=max_tokens, min_tokens=max_tokens)
        assert (params.max_tokens, params.min_tokens) == (512, 512)
    assert params_of(tokenizer, max_tokens=511).max_tokens == 511


@pytest.mark.parametrize("temperature", [1e-6, 0.0009999, 0.0])
def test_a_temperature_below_a_thousandth_is_greedy(tokenizer, temperature):
    params = params_of(tokenizer, temperature=temperature, seed=3, top_p=0.9)
    assert (params.is_greedy, params.effective_temperature, params.log_prob_temperature) == (True, 0.0, 1.0)
    assert not params_of(tokenizer, temperature=0.001).is_greedy


BAD = [
    ({"text": None}, "text_input or input_ids"),
    ({"text": "a", "token_ids": (1,)}, "one of them"),
    ({"text": ""}, "the prompt is empty"),
    ({"text": None, "token_ids": ()}, "the prompt is empty, it needs"),
    ({"text": None, "token_ids": (1, 320)}, "token id 320"),
    ({"text": None, "token_ids": (-1,)}, "token id -1"),
    ({"text": None, "token_ids": (1,) * 512}, "512 tokens, the engine takes at most 511"),
    ({"text": "a" * 1_000_000}, "the prompt has 1000000 characters"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"min_tokens": 17}, "min_tokens is 17"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"allowed_token_ids": ()}, "allowed_token_ids is empty, so that no token could come; leave it out"),
    ({"allowed_token_ids": (1, 320)}, "allowed_token_ids holds token id 320, the vocabulary has ids 0 to 319"),
    ({"allowed_token_ids": (1,) * 16_385}, "allowed_token_ids has 16385 entries, allowed are at most 16384"),
    ({"end_ids": (999,)}, "end_id holds token id 999"),
    ({"stop_words": ("x",) * 65}, "65 entries, allowed are at most 64"),
    ({"stop_words": ("x" * 2000,)}, "2000 characters"),
    ({"embedding_bias_words": ("a",)}, "one weight for each word"),
    ({"embedding_bias_words": ("a",), "embedding_bias_weights": (float("nan"),)}, "nan"),
    ({"priority": 1.5}, "priority is 1.5"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_gets_one_sentence(tokenizer, fields, message):
    with pytest.raises(InvalidArgumentError) as caught:
        TextGenerator(ScriptExecutor(), tokenizer).submit("r", TextRequest(**{"text": "a"} | fields), print)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_text_with_bos_is_a_prompt(tmp_path):
    write_tokenizer(tmp_path, 320, add_bos=True)
    executor = ScriptExecutor()
    TextGenerator(executor, Tokenizer.load(tmp_path)).submit("r", TextRequest(text=""), print)
    assert executor.request.prompt_len == 1


def test_the_sequences_of_a_prompt_are_tokenized_once_and_have_their_own_seeds(tokenizer, monkeypatch):
    """64 sequences took 64 times as long on the thread that reads all clients' requests."""
    encoded, encode = [], Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **options: encoded.append(text) or encode(self, text))
    generator = TextGenerator(ScriptExecutor(), tokenizer)
    request = TextRequest(text="hello", seed=1, stop_words=("END",), bad_words=("x",), temperature=1.0)
    first = generator.prepare(request)
    num_encoded = len(encoded)
    second = generator.prepare(replace(request, seed=2), like=first)
    assert len(encoded) == num_encoded
    assert second.stop_words is first.stop_words
    assert (first.params.seed, second.params.seed) == (1, 2)
    assert second == generator.prepare(replace(request, seed=2)), "as if it had come alone"
    other = generator.prepare(replace(request, text="other"), like=first)
    assert other == generator.prepare(replace(request, text="other"))


@pytest.mark.parametrize("others", [{}, {"bad_words": ("x",)}])
def test_a_prediction_ends_before_the_first_token_that_the_model_lacks(tmp_path, others):
    """A tokenizer may have more tokens than the model has rows; a prediction is a hint and fails no request."""
    write_tokenizer(tmp_path, 320)
    path = tmp_path / "tokenizer.json"
    definition = json.loads(path.read_text())
    flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    definition["added_tokens"].append({"id": 320, "content": "<new>"} | flags)
    path.write_text(json.dumps(definition))
    tokenizer = Tokenizer.load(tmp_path)
    assert 320 in tokenizer.encode("ab<new>ab")
    for text, known in (("ab<new>ab", "ab"), ("<new>ab", ""), ("abab", "abab")):
        params = params_of(tokenizer, prediction=text, **others)
        assert list(params.prediction) == tokenizer.encode(known, add_special_tokens=False)
