"""Two workers behind NVIDIA Dynamo's frontend: requests go where their prefix is, and no stream is lost silently."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from tests.serving.dynamo import surface
from tests.serving.dynamo.cluster import Cluster
from tests.support.checkpoints import make_pair
from tests.support.effort import ONLY_ALL
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [
    ONLY_ALL,
    pytest.mark.skipif(not surface.IS_INSTALLED, reason="needs ai-dynamo and ai-dynamo-runtime (docs/integrations.md)"),
]
BLOCK = 16
NUM_STREAMS, MAX_TOKENS = 24, 400


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(engine directory, target checkpoint)"""
    directory = tmp_path_factory.mktemp("pair")
    target, draft = make_pair(directory, 320, num_layers=6)
    template = target / "tokenizer_config.json"
    settings = json.loads(template.read_text()) | {
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"
    }
    template.write_text(json.dumps(settings))
    sizes = {"max_batch_size": 8, "max_seq_len": 512, "max_draft_len": 4, "tokens_per_block": BLOCK}
    build_engines(BuildOptions(target, draft, directory / "engine", **sizes))
    return directory / "engine", target


@pytest.fixture
def cluster(pair, tmp_path):
    with Cluster(*pair, tmp_path) as found:
        yield found


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, 300, (count, length)).tolist()


def test_a_prompt_goes_where_its_prefix_is(cluster: Cluster) -> None:
    families = prompts(8, 6 * BLOCK, 0)
    streams = [cluster.stream([*prefix, 7, 8], 200) for prefix in families]  # at once, so that both workers get some
    assert all(stream.has_ended.wait(PATIENCE_S) and stream.finish_reason for stream in streams)
    for tail in prompts(3, 5, 1):
        for prefix in families:
            assert cluster.num_cached(prefix + tail) == 6 * BLOCK
    cluster.workers[0].kill()
    left = [cluster.num_cached([*prefix, 9]) for prefix in families]
    assert {0, 6 * BLOCK} == set(left), "each worker had some of them"


def test_a_killed_worker_loses_no_stream_silently(cluster: Cluster, pair) -> None:
    asked = prompts(NUM_STREAMS, 20, 2)
    whole = [cluster.complete(prompt, MAX_TOKENS)["choices"][0]["text"] for prompt in asked]
    streams = [cluster.stream(prompt, MAX_TOKENS) for prompt in asked]
    wait_until(lambda: any(stream.text for stream in streams), poll_s=0.001)
    victim = cluster.workers[0]
    os.kill(victim.pid, signal.SIGSTOP)
    wait_until(lambda: sum(not stream.has_ended.is_set() for stream in streams) < NUM_STREAMS)
    victim.kill()
    for stream in streams:
        assert stream.has_ended.wait(PATIENCE_S)
    for stream, text in zip(streams, whole, strict=True):
        assert (stream.finish_reason is None) == (stream.error is not None), stream
        assert text == stream.text if stream.finish_reason else text.startswith(stream.text)
    print(
        sum(s.error is not None for s in streams),
        [s.error for s in streams if s.error][:2],
        [len(s.text) for s in streams],
    )
    assert any(stream.error for stream in streams)
    assert any(stream.finish_reason for stream in streams)
    assert [cluster.complete(prompt, MAX_TOKENS)["choices"][0]["text"] for prompt in asked] == whole
