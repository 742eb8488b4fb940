"""The socket between the stub and the engine child."""

import socket
import struct
import threading

import pytest

from faser_trtllm.serving.text.request import Statistics, TextRequest
from faser_trtllm.serving.worker import messages
from faser_trtllm.serving.worker.messages import Connection, ConnectionClosedError

STATISTICS = Statistics(1, 2, 3, 2, 0, 0, 2, queue_ms=0.5)
ALL = [
    messages.Submit(1, TextRequest(text="naïve 😀 \0", seed=2**64 - 1, stop_words=("a", "b"), end_ids=())),
    messages.Submit(2, TextRequest(token_ids=(1, 2, 3), timeout_ms=5.0, stream=False)),
    messages.Cancel(1),
    messages.Ping(),
    messages.Drain(),
    messages.Ready(320, 512, 4),
    messages.Chunk(1, "text", (1, 2)),
    messages.Chunk(2, "", (), "stop", STATISTICS),
    messages.Chunk(3, "a", (5,), log_probs=(-0.5,), logits=b"\0" * 8),
    messages.Stop(1),
    messages.Failed(None, "INTERNAL", "why"),
    messages.Draining(),
    messages.Pong({"num_steps": 1.0}),
]


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    connections = Connection(left), Connection(right)
    yield connections
    for connection in connections:
        connection.close()


def test_every_message_arrives_as_it_was_sent(pair):
    left, right = pair
    for message in ALL:
        left.send(message)
    received = []
    while len(received) < len(ALL):
        received += right.receive(1.0)
    assert received == ALL


def test_chunks_of_one_request_that_arrive_together_are_one(pair):
    left, right = pair
    left.send(messages.Chunk(1, "a", (1,), log_probs=(-1.0,), logits=b"x"))
    left.send(messages.Chunk(2, "other", (9,)))
    left.send(messages.Chunk(1, "b", (2, 3), "stop", STATISTICS, log_probs=(-2.0, -3.0), logits=b"y"))
    assert right.receive(1.0) == [
        messages.Chunk(1, "ab", (1, 2, 3), "stop", STATISTICS, (-1.0, -2.0, -3.0), b"xy"),
        messages.Chunk(2, "other", (9,)),
    ]


def test_a_reader_that_stalls_does_not_block_the_sender(pair):
    left, right = pair
    text = "x" * 100_000
    for i in range(100):
        left.send(messages.Chunk(i, text, ()))
    received = []
    while len(received) < 100:
        received += right.receive(2.0)
    assert [m.id for m in received] == list(range(100))
    assert {m.text for m in received} == {text}
    assert left.flush(1.0)


def test_many_senders_do_not_mix_frames(pair):
    left, right = pair

    def send(start):
        for i in range(200):
            left.send(messages.Chunk(start + i, "y" * 3000, ()))

    threads = [threading.Thread(target=send, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    received = []
    while len(received) < 800:
        received += right.receive(2.0)
    for thread in threads:
        thread.join()
    assert sorted(m.id for m in received) == sorted(1000 * k + i for k in range(4) for i in range(200))


@pytest.mark.parametrize(
    "data", [struct.pack("<I", 1 << 31), struct.pack("<I", 3) + b"abc", struct.pack("<I", 1) + b"\xc0"]
)
def test_bytes_that_are_no_message_end_the_connection(data):
    left, right = socket.socketpair()
    connection = Connection(right)
    left.sendall(data)
    with pytest.raises(ConnectionClosedError):
        connection.receive(1.0)
    left.close()
    connection.close()


def test_the_end_of_the_other_side_is_seen(pair):
    left, right = pair
    left.shutdown()
    with pytest.raises(ConnectionClosedError):
        right.receive(1.0)
    with pytest.raises(ConnectionClosedError):
        right.send(messages.Ping())
    with pytest.raises(ConnectionClosedError):
        left.send(messages.Ping())
