"""All open requests together take a bounded amount of memory, which the engine process gives back."""

import ctypes
import struct
import tracemalloc
import uuid
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import UnavailableError
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.log_probs import TokenRows, token_log_probs
from faser_trtllm.serving.engine_process import wire
from faser_trtllm.serving.engine_process.memory import BYTES_PER_BODY_BYTE, RequestMemory, sequence_bytes
from faser_trtllm.serving.engine_process.wire import FromBackend, OpenStatus, ToBackend
from tests.serving.engine_process.outbox_world import ints
from tests.support.backend_frames import texts_array
from tests.support.backend_peer import Backend
from tests.support.effort import pick
from tests.support.fake_engine import ENDLESS

UNAVAILABLE = wire.ERROR_CODES["UNAVAILABLE"]
LIMIT = 1 << 20
YES = np.array([[True]])


def test_a_request_takes_half_of_what_others_leave():
    memory = RequestMemory(100)
    memory.take(1, 20)
    memory.take(1, 30)
    expected = (
        "the request takes up to 26 more bytes of memory, but its client may take only 25 more, since each client "
        r"gets half of what others leave of max_queue_bytes \(100\); try again later, or ask for less"
    )
    with pytest.raises(UnavailableError, match=expected):
        memory.take(2, 26)
    memory.take(2, 25)
    with pytest.raises(UnavailableError):
        memory.take(2, 1)
    memory.release(1)
    memory.release(1)
    memory.release(9)
    memory.take(2, 25)
    memory.take(3, 25)


def test_the_requests_of_a_client_take_half_of_what_others_leave_together():
    memory = RequestMemory(100)
    memory.take(1, 30, "a")
    memory.take(2, 20, "a")
    with pytest.raises(UnavailableError):
        memory.take(3, 1, "a")
    memory.take(4, 20, "b")
    with pytest.raises(UnavailableError):
        memory.take(5, 6, "b")
    memory.take(6, 5, "c")
    memory.release(2)
    memory.take(7, 5, "a")


@pytest.fixture
def backend(fake_engine_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("FASER_FAKE_STEP_S", "0.2")  # none ends before the last is there
    config = tmp_path / "faser.yaml"
    config.write_text(f"max_queue_bytes: {LIMIT}\n")
    with Backend(fake_engine_dir, str(config)) as backend:
        backend.hello()
        backend.open(0)
        assert backend.opened()[1] is OpenStatus.OPENED
        yield backend


def cancel(backend, handle):
    backend.send(FromBackend.CANCEL, struct.pack("<Q", handle))


BODY = b"ab " * ((LIMIT // 4 - (32 << 10)) // BYTES_PER_BODY_BYTE // 3)
FOURTHS = {
    "bodies": {"text_input": BODY, "max_tokens": ints(ENDLESS)},
    "log probs": {"text_input": b"a", "return_log_probs": YES, "num_top_log_probs": ints(20), "max_tokens": ints(300)},
    "logits": {"text_input": b"a", "return_generation_logits": YES, "max_tokens": ints(160)},
}
"""Requests that may take almost a fourth of the limit."""


def test_a_stop_takes_no_memory(backend):
    """It is answered where no further request is admitted."""
    own = str(uuid.uuid4())
    for handle in range(8):
        backend.ask(0, handle, request_id=own, **FOURTHS["bodies"])
    refused = set(backend.answers(5))
    backend.ask(0, 100, request_id=own, text_input=BODY, stop=YES)
    ended = backend.answers(4)
    assert ended.pop(100) == [{}]
    assert set(ended) == set(range(8)) - refused
    assert all(answers[-1]["finish_reason"][2][4:] == b"cancelled" for answers in ended.values())


@pytest.mark.parametrize("name", FOURTHS)
def test_requests_that_hold_too_much_together_are_unavailable_and_others_are_served(backend, name):
    for handle in range(8):
        backend.ask(0, handle, **FOURTHS[name])
    refused = backend.answers(5)
    for (error,) in refused.values():
        assert error.code == UNAVAILABLE
        assert f"half of what others leave of max_queue_bytes ({LIMIT}); try again later" in error.message
    backend.ask(0, 100, text_input=b"abc", max_tokens=ints(3))
    assert backend.answers(1)[100][0]["text_output"][2][4:] == b"abcabc"
    running = set(range(8)) - set(refused)
    for handle in running:
        cancel(backend, handle)
    backend.answers(len(running))
    backend.ask(0, 101, **FOURTHS[name])
    cancel(backend, 101)
    assert backend.answers(1)[101][0].code == wire.ERROR_CODES["CANCELLED"], "there is room again"


def resident_bytes(process):
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the process has ended")


@pytest.mark.parametrize("num_others", [1, *pick([], [0])])
def test_memory_is_given_back_after_a_burst(fake_engine_dir, num_others):
    with Backend(fake_engine_dir) as backend:
        backend.hello()
        backend.open(0)
        assert backend.opened()[1] is OpenStatus.OPENED
        backend.ask(0, 0, text_input=b"abc", max_tokens=ints(4))
        backend.answers(1)
        for handle in range(100, 100 + num_others):
            backend.ask(0, handle, text_input=b"abc", max_tokens=ints(ENDLESS))
        before = resident_bytes(backend.process)
        for handle in range(40):
            backend.ask(0, handle, text_input=b"ab cd " * 9000, max_tokens=ints(40))
        prompts = {"text_input": texts_array([[b"ab cd " * 3000]] * 4), "max_tokens": np.full((4, 1), 40, np.int32)}
        for handle in range(40, 43):
            backend.ask(0, handle, num_return_sequences=np.full((4, 1), 64, np.int32), **prompts)
        backend.answers(43)
        backend.send(FromBackend.PING)
        backend.receive(ToBackend.PONG)
        assert resident_bytes(backend.process) <= 1.1 * before + (32 << 20)


@pytest.mark.parametrize(
    ("num_bytes", "num_left", "num_trims"),
    [(1, 0, 1), (0, 0, 0), (15 << 20, 1, 0), (17 << 20, 1, 1)],
)
def test_memory_is_given_back_once_after_all_requests_have_ended(monkeypatch, num_bytes, num_left, num_trims):
    calls = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=calls.append))
    memory = RequestMemory(1 << 30)
    memory.take(0, num_bytes)
    for handle in range(1, 1 + num_left):
        memory.take(handle, 1)
    memory.release(0)
    memory.trim()
    memory.trim()
    assert calls == [0] * num_trims


def test_guides_are_released_while_no_request_is_open(fake_engine_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("FASER_FAKE_RELEASED", str(tmp_path / "released"))
    with Backend(fake_engine_dir) as backend:
        backend.hello()
        backend.open(0)
        assert backend.opened()[1] is OpenStatus.OPENED
        backend.ask(0, 0, text_input=b"abc", max_tokens=ints(ENDLESS))
        backend.send(FromBackend.PING)
        backend.receive(ToBackend.PONG)
        assert not (tmp_path / "released").exists()
        cancel(backend, 0)
        backend.answers(1)
        backend.send(FromBackend.PING)
        backend.receive(ToBackend.PONG)
        assert (tmp_path / "released").exists()


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_log_probs_take_at_most_what_is_counted(num_top):
    n, vocab_size = 500, 64
    sampling = np.zeros(n, SAMPLING_DTYPE)
    for name in ("temperature", "top_p", "repetition_penalty"):
        sampling[name] = 1.0
    logits = np.random.default_rng(0).normal(size=(n, vocab_size)).astype(np.float32)
    tokens = np.zeros(n, np.int32)
    asked = TokenRows(np.arange(n), tokens, tokens, sampling, np.full(n, num_top, np.int32))
    token_log_probs(logits, vocab_size, asked)  # the first call loads code
    tracemalloc.start()
    found = token_log_probs(logits, vocab_size, asked)
    kept = [found.values.tolist(), found.tops]
    del found
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept[1]) == n
    params = SamplingParams(max_tokens=n, return_log_probs=True, num_top_log_probs=num_top)
    counted = sequence_bytes(params, 1, n, vocab_size) - sequence_bytes(SamplingParams(max_tokens=n), 1, n, vocab_size)
    assert held <= counted
