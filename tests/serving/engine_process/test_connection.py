"""The socket between the engine process and the Triton backend."""

import contextlib
import queue
import socket
import struct
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.serving.edge import connection as connection_module
from faser_trtllm.serving.edge import wire
from faser_trtllm.serving.edge.connection import EdgeConnection
from faser_trtllm.serving.edge.wire import FromEdge, ToEdge, WireError
from tests.support.edge_frames import packed, read_frame
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    with ours, theirs:
        yield EdgeConnection(ours), theirs


frames = st.lists(st.tuples(st.sampled_from(FromEdge), st.binary(max_size=40)), min_size=1, max_size=6)


@given(frames, st.lists(st.integers(1, 60), max_size=8))
def test_frames_arrive_whole_however_they_were_cut(frames, sizes):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = EdgeConnection(ours)
        data = b"".join(packed(kind, struct.pack("<I", len(content)) + content) for kind, content in frames)
        found = []
        for size in [*sizes, len(data)]:
            part, data = data[:size], data[size:]
            if not part:
                break
            theirs.sendall(part)
            if not data or len(found) < len(frames):
                ours.setblocking(False)
                with contextlib.suppress(BlockingIOError):  # no frame is whole yet
                    found += [(kind, bytes(body.content(body.u32()))) for kind, body in connection.receive()]
        assert found == frames


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (struct.pack("<I", wire.MAX_FRAME_BYTES + 1), "allowed are 1 to"),
        (struct.pack("<I", 0), "a frame of 0 bytes"),
        (packed(99, b""), "a frame of unknown type 99"),
    ],
)
def test_what_is_not_a_frame_is_refused(ends, data, says):
    connection, theirs = ends
    theirs.sendall(data)
    with pytest.raises(WireError, match=says):
        list(connection.receive())


def test_the_end_of_the_stream(ends):
    connection, theirs = ends
    theirs.close()
    with pytest.raises(EOFError):
        connection.receive()


def test_what_came_while_the_socket_was_busy_goes_out_as_one_frame(ends, monkeypatch):
    connection, theirs = ends
    monkeypatch.setattr(connection_module, "MAX_RESPONSES_BYTES", 100)
    responses = [wire.final_flag(handle) for handle in range(30)]
    for response in responses:
        connection.respond(response)
    connection.send(ToEdge.PONG, b"x")
    writer = threading.Thread(target=connection.run_writer, args=(lambda everything: None,))
    writer.start()
    bodies = []
    while True:
        kind, body = read_frame(theirs)
        if kind is ToEdge.PONG:
            break
        assert kind is ToEdge.RESPONSES
        assert len(body) <= 100
        bodies.append(body)
    assert b"".join(bodies) == b"".join(responses)
    assert len(bodies) == 3
    assert connection.flush(PATIENCE_S)
    connection.close()
    writer.join(PATIENCE_S)
    assert not writer.is_alive()


def test_the_writer_asks_for_what_is_due(ends):
    connection, theirs = ends
    due = [wire.final_flag(5)]

    def produce(everything):
        while due:
            connection.respond(due.pop())

    threading.Thread(target=connection.run_writer, args=(produce,), daemon=True).start()
    connection.notify()
    assert read_frame(theirs) == (ToEdge.RESPONSES, wire.final_flag(5))
    connection.close()


def test_a_writer_that_rests_takes_what_is_urgent_at_once_and_the_rest_once_in_time(ends, monkeypatch):
    connection, _theirs = ends
    asked = queue.SimpleQueue()

    def produce(everything):
        asked.put(everything)
        time.sleep(0.01)  # work to rest from
        connection.respond(wire.final_flag(int(everything)))

    monkeypatch.setattr(connection_module, "_REST_RATIO", 1e6)
    connection.rest_at_most(1000 * PATIENCE_S)
    threading.Thread(target=connection.run_writer, args=(produce,), daemon=True).start()
    connection.notify(is_urgent=False)
    assert asked.get(timeout=PATIENCE_S), "a writer that has not worked yet sends everything at once"
    connection.notify(is_urgent=False)
    connection.notify()
    assert not asked.get(timeout=PATIENCE_S), "urgent responses alone while it rests"
    connection.close()


def test_what_is_not_urgent_goes_out_after_the_longest_rest(ends, monkeypatch):
    connection, _theirs = ends
    asked = queue.SimpleQueue()

    def produce(everything):
        asked.put(everything)
        time.sleep(0.01)

    monkeypatch.setattr(connection_module, "_REST_RATIO", 1e9)
    connection.rest_at_most(0.05)
    threading.Thread(target=connection.run_writer, args=(produce,), daemon=True).start()
    for _ in range(3):
        connection.notify(is_urgent=False)
        assert asked.get(timeout=PATIENCE_S)
    connection.close()


def test_a_lost_edge_ends_the_writer(ends):
    connection, theirs = ends
    writer = threading.Thread(target=connection.run_writer, args=(lambda everything: None,))
    writer.start()
    theirs.close()
    connection.respond(wire.final_flag(1))
    connection.respond(wire.final_flag(2))
    writer.join(PATIENCE_S)
    assert not writer.is_alive()


def test_a_socket_that_fails_is_in_the_log(caplog):
    ours, theirs = socket.socketpair()
    connection = EdgeConnection(ours)
    ours.setblocking(False)
    connection.send(ToEdge.DRAINING, bytes(8 << 20))
    with ours, theirs:
        connection.run_writer(lambda everything: None)
    assert "nothing more can be sent to the Triton backend" in caplog.text


def test_a_backend_that_hangs_up_is_no_error(ends, caplog):
    connection, backend = ends
    backend.close()
    connection.send(ToEdge.DRAINING, bytes(8 << 20))
    connection.run_writer(lambda everything: None)
    assert not caplog.text
