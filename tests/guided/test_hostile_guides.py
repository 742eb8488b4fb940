"""Guides that take all the time they may do not keep a plain one waiting, whoever sent them."""

import json
import threading
import time
from pathlib import Path

import pytest

from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.text.service import TextGenerator
from tests.support.fake_engine import EchoExecutor
from tests.support.triton_server import ROOT
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

NUM_HOSTILE = 64


class Service:
    """The real path of a guided request, over an executor that echoes the prompt."""

    def __init__(self):
        self.executor = EchoExecutor(vocab_size=4096)
        self.generator = TextGenerator(self.executor, Tokenizer.load(ROOT / "engines" / "demo" / "target"))

    def submit(self, name, schema, **fields):
        outputs, ended = [], threading.Event()
        request = TextRequest(
            text="x",
            max_tokens=1,
            guided_decoding_guide_type="json_schema",
            guided_decoding_guide=json.dumps(schema),
            **fields,
        )

        def collect(output):
            outputs.append(output)
            if output.is_final:
                ended.set()

        self.generator.submit(name, request, collect)
        return outputs, ended

    def first_token_s(self, name, schema, finish_reasons=("length",)):
        started_s = time.monotonic()
        outputs, ended = self.submit(name, schema)
        while not ended.wait(0.001):
            self.executor.step()
            assert time.monotonic() < started_s + 2 * PATIENCE_S
        assert outputs[-1].finish_reason in finish_reasons
        return time.monotonic() - started_s


def plain(name):
    return {"type": "object", "properties": {name: {"type": "integer"}}}


def hostile(i):
    """Return a guide of 41 bytes that takes more than a second of CPU time. Only a fast machine compiles it."""
    return {"type": "integer", "multipleOf": 400_009 + 2 * i}


def test_a_plain_guide_next_to_hostile_ones():
    service = Service()
    service.first_token_s("first", plain("first"))  # it starts what compiles
    one_s = service.first_token_s("one", hostile(NUM_HOSTILE), ("length", "error"))
    for i in range(NUM_HOSTILE):
        service.submit(f"hostile{i}", hostile(i))
    next_to_them_s = [service.first_token_s(f"plain{i}", plain(f"plain{i}")) for i in range(5)]
    for i in range(NUM_HOSTILE):
        service.generator.cancel(f"hostile{i}")
    assert sum(next_to_them_s) < one_s, "five plain guides, one after the other, and a single hostile one"


def test_the_process_that_forks_has_one_thread():
    """A fork of a process with several threads may inherit a lock that nobody releases."""
    before = children()
    service = Service()
    service.first_token_s("plain", plain("a"))
    added = children() - before
    assert len(added) == 1
    assert "Threads:\t1\n" in Path(f"/proc/{added.pop()}/status").read_text()


def children():
    """Return the pids of this process's children."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}
