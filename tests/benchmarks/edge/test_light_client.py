"""The client that only counts, against a real server: it sees the responses that gRPC's library reads, and errors."""

import socket
import threading

import pytest

from benchmarks.edge.__main__ import request_bytes, run_grpcio
from benchmarks.edge.light_client import STREAMS_PER_CONNECTION, run_streams
from tests.support.checkpoints import write_tokenizer
from tests.support.fake_engine import TOKENS_PER_STEP
from tests.support.triton_server import Server

pytestmark = [pytest.mark.triton, pytest.mark.slow]

MAX_RUNS = 30


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    write_tokenizer(directory, 320)
    config = directory / "faser.yaml"
    config.write_text("stream_interval: 1\n")
    with Server(directory, is_fake=True, config=config, log=directory / "log") as server:
        yield int(server.wait_ready().grpc_url.rpartition(":")[2])


def test_it_counts_every_response(port):
    num_streams, max_tokens = STREAMS_PER_CONNECTION + 3, 60  # two connections
    request = request_bytes(max_tokens)
    wanted = num_streams * max_tokens // TOKENS_PER_STEP
    for run in (run_streams, run_grpcio):
        # A step whose output still waits when the next one ends is merged with it, as happens on a busy machine.
        counts = [run(port, num_streams, request)]
        while counts[-1] != wanted and len(counts) < MAX_RUNS:
            counts.append(run(port, num_streams, request))
        assert counts[-1] == wanted == max(counts), (run.__name__, counts)


def test_frames_in_any_pieces_are_counted():
    """A server that sends a byte at a time: two messages in one frame, one in two frames, a ping between them."""

    def frame(kind, flags, stream, payload=b""):
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    message = b"\0" + (4).to_bytes(4, "big") + b"\x12abc"
    sent = frame(4, 0, 0) + frame(0, 0, 1, message + message) + frame(0, 0, 1, message[:3])
    sent += frame(6, 0, 0, b"12345678") + frame(0, 0, 1, message[3:]) + frame(1, 5, 1)
    received = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                for place in range(len(sent)):
                    connection.sendall(sent[place : place + 1])
                while piece := connection.recv(4096):
                    received.extend(piece)

        thread = threading.Thread(target=serve)
        thread.start()
        assert run_streams(listener.getsockname()[1], 1, b"request") == 3
        thread.join()
    assert frame(6, 1, 0, b"12345678") in received, "a ping is answered"
    assert b"request" in received
