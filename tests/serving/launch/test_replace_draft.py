"""SIGUSR1 to `faser serve`: the draft of the engine directory, built again, takes the place of the one that runs."""

import signal

import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.serving.client import generate_http
from tests.support.checkpoints import make_checkpoint, make_pair
from tests.support.triton_server import Server
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]

SIZES = {"max_batch_size": 2, "max_seq_len": 128, "max_draft_len": 4}


def test_the_draft_that_was_built_again_takes_its_place(tmp_path):
    target, draft = make_pair(tmp_path)
    options = {"output_dir": tmp_path / "engine", "force": True, **SIZES}
    build_engines(BuildOptions(target, draft, **options))
    with Server(tmp_path / "engine", speculation="fixed:4", log=tmp_path / "log") as server:
        server.wait_ready()
        before = generate(server)
        assert before.num_accepted_tokens < before.num_draft_tokens
        build_engines(BuildOptions(target, target, **options))
        server.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: "has replaced the previous one" in server.output())
        after = generate(server)
        assert after.text == before.text
        assert after.num_accepted_tokens == after.num_draft_tokens > 0, "the target drafts for itself"

        other = make_checkpoint(tmp_path / "other", num_layers=2, seed=9)
        build_engines(BuildOptions(other, other, **options))
        server.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: "the draft was not replaced: the target in" in server.output())
        assert generate(server).text == before.text
        assert server.process.poll() is None


def generate(server):
    return generate_http(server.http_url, "one two three", max_tokens=40)
