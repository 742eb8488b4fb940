"""Log probs of prompts and the most probable tokens, as clients score by them: the client package and
lm-evaluation-harness's requests against `faser openai`, real engines and a real Triton server."""

import json
import urllib.request
from operator import itemgetter

import numpy as np
import pytest
from openai.types import Completion

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.models.weights import CheckpointWeights
from faser_trtllm.serving.client import GrpcClient
from tests.support.checkpoints import END_OF_TEXT
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.triton, pytest.mark.slow]

BF16_ERROR = 0.1  # of a log prob, as tests/executor/test_context_log_probs.py has it
TEXTS = ["hello world", "def f(x):\n    return x", "naïve 😀 naïve"]


@pytest.fixture(scope="module")
def tokenizer(engine_dir):
    return Tokenizer.load(EngineDir.load(engine_dir).tokenizer_dir)


@pytest.fixture(scope="module")
def expected(engine_dir):
    """Log probs [len(token_ids) - 1, vocab] of a text, by torch."""
    target = engine_dir.parent / "target"
    model = ReferenceModel(load_model_config(target), CheckpointWeights(target))
    return lambda token_ids: model.logits(token_ids).log_softmax(-1)[:-1].numpy()


def lm_eval_scores(frontend, prompts, context_lengths):
    """(log prob of the continuation, whether it is the greedy one) of each prompt, as lm-evaluation-harness's model
    local-completions asks and reads: LocalCompletionsAPI._create_payload and parse_logprobs of its
    lm_eval/models/openai_completions.py (commit 0064c3a). Prompts are token ids, or texts (tokenized_requests=False);
    the last token's log prob is cut off, since the one that max_tokens asks for is thought to be there."""
    payload = {"model": "faser", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    body = json.dumps(payload | {"echo": True}).encode()
    url = f"http://127.0.0.1:{frontend.port}/v1/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        choices = json.load(answer)["choices"]
    scores = []
    for choice, length in zip(sorted(choices, key=itemgetter("index")), context_lengths, strict=True):
        values = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        scores.append((sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))))
    return scores


def test_lm_evaluation_harness_scores_continuations(frontend, triton, tokenizer, expected):
    """One is what the model says itself, the others are not; several prompts at once, as tokens and as texts."""
    context = tokenizer.encode("the answer is")
    with GrpcClient(triton.grpc_url) as client:
        own = [token for part in client.stream(input_ids=context, max_tokens=6, end_id=-1) for token in part.token_ids]
    prompts = [context + own, context + own[:4] + [own[4] ^ 1, own[5]]]
    prompts += [tokenizer.encode(text) for text in ("the answer is yes", "the answer is no, of course")]
    lengths = [len(context)] * len(prompts)
    scores = lm_eval_scores(frontend, prompts, lengths)
    assert [is_greedy for _, is_greedy in scores] == [True, False, False, False]
    for prompt, (score, is_greedy) in zip(prompts, scores, strict=True):
        rows, tokens = expected(prompt)[len(context) - 1 :], prompt[len(context) :]
        assert score == pytest.approx(rows[np.arange(len(tokens)), tokens].sum(), abs=BF16_ERROR * len(tokens))
        assert is_greedy or (rows.argmax(-1) != tokens).any()
    texts = ["the answer is yes", "the answer is no, of course"]
    assert lm_eval_scores(frontend, texts, lengths[2:]) == scores[2:]


def test_an_end_token_behind_a_prompt_is_there_to_be_cut_off(frontend, client, tokenizer):
    """Or the prompt's own last token would be cut off in its place."""
    end = tokenizer.token_id(END_OF_TEXT)
    fields = {"model": "faser", "prompt": "hello", "logprobs": 1, "logit_bias": {str(end): 100}, "temperature": 0}
    answer = client.completions.create(**fields, max_tokens=1, echo=True).choices[0]
    assert (answer.text, answer.finish_reason) == ("hello", "length")
    assert len(answer.logprobs.token_logprobs) == len(tokenizer.encode("hello")) + 1
    plain = client.completions.create(**fields, max_tokens=1).choices[0]
    assert (plain.text, plain.finish_reason, plain.logprobs.tokens) == ("", "stop", [])


def read(answer):
    """Text, log probs and finish reasons of each choice of a completion, whole or as a stream."""
    texts, parts, reasons = {}, {}, {}
    for chunk in [answer] if isinstance(answer, Completion) else answer:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs is not None:
                kept = parts.setdefault(choice.index, {})
                for name, values in choice.logprobs.model_dump().items():
                    kept[name] = kept.get(name, []) + values
    return texts, parts, reasons


@pytest.mark.parametrize("prompt", TEXTS)
def test_an_echo_is_the_prompt_and_what_follows_it(client, tokenizer, expected, prompt):
    """Whole and as a stream, with drafts and without, sent as text and as tokens."""
    ids = tokenizer.encode(prompt)
    fields = {"model": "faser", "max_tokens": 12, "logprobs": 3, "temperature": 0}
    texts, parts, reasons = read(client.completions.create(prompt=prompt, **fields, echo=True))
    plain, behind, _ = read(client.completions.create(prompt=prompt, **fields))
    assert texts == {0: prompt + plain[0]}
    found, num_context = parts[0], len(ids)
    assert "".join(found["tokens"][:num_context]) == prompt
    assert found["text_offset"][num_context] == len(prompt)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert found[name][num_context:] == behind[0][name]
    rows = expected(ids)
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][1:num_context] == pytest.approx(
        rows[np.arange(num_context - 1), ids[1:]], abs=BF16_ERROR
    )
    assert found["top_logprobs"][0] is None
    for token, logprob, top in list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))[
        1:
    ]:
        assert token in top
        assert top[token] >= logprob, "of equal texts the more probable"
        assert 1 <= len(top) <= 4
        assert list(top.values())[:3] == sorted(top.values(), reverse=True)[:3]
    for sent in (prompt, ids):
        for more in ({"stream": True}, {"extra_body": {"num_draft_tokens": 0}}):
            assert read(client.completions.create(prompt=sent, **fields, **more, echo=True)) == (texts, parts, reasons)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone(client, tokenizer, stream):
    """It is computed, and nothing is said behind it; what the cache has of it is computed again."""
    num_tokens = len(tokenizer.encode(TEXTS[1] * 3))
    fields = {"model": "faser", "prompt": TEXTS[1] * 3, "max_tokens": 0, "echo": True, "n": 2}
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for logprobs in (None, 0, 20):
        answer = client.completions.create(**fields, **more, logprobs=logprobs)
        chunks = list(answer) if stream else [answer]
        texts, parts, reasons = read(chunks)
        assert (texts, reasons) == (dict.fromkeys(range(2), TEXTS[1] * 3), dict.fromkeys(range(2), "length"))
        usage = chunks[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (num_tokens, 0, num_tokens)
        if logprobs is None:
            assert parts == {}
            continue
        assert usage.prompt_tokens_details.cached_tokens == 0
        assert parts[0] == parts[1]
        assert len(parts[0]["tokens"]) == num_tokens


def test_chats_have_alternatives_whatever_is_drafted(client):
    messages = [{"role": "user", "content": "naïve 😀"}]
    fields = {"model": "faser", "messages": messages, "max_tokens": 20, "logprobs": True, "top_logprobs": 4}

    def ask(**more):
        answer = client.chat.completions.create(**fields, temperature=0, **more)
        parts = [choice.logprobs for chunk in (answer if more.get("stream") else [answer]) for choice in chunk.choices]
        return [entry.model_dump() for part in parts if part is not None for entry in part.content]

    found = ask(extra_body={"num_draft_tokens": 0, "ignore_eos": True})
    assert len(found) == 20
    for entry in found:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert (entry["token"], entry["logprob"]) == (entry["top_logprobs"][0]["token"], values[0]), "it is greedy"
        assert all(bytes(top["bytes"]).decode() == top["token"] for top in entry["top_logprobs"])
    assert ask(stream=True, extra_body={"ignore_eos": True}) == found
