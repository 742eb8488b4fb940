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

from faser_trtllm.serving.engine_process import connection as connection_module
from faser_trtllm.serving.engine_process import wire
from faser_trtllm.serving.engine_process.connection import Connection
from faser_trtllm.serving.engine_process.wire import FromBackend, ToBackend, WireError
from tests.support.backend_frames import packed, read_frame
from tests.support.waiting import PATIENCE_S


def nothing(everything):
    """No responses are due."""
    return []


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    with ours, theirs:
        yield Connection(ours), theirs


frames = st.lists(st.tuples(st.sampled_from(FromBackend), st.binary(max_size=40)), min_size=1, max_size=6)


@given(frames, st.lists(st.integers(1, 60), max_size=8))
def test_frames_arrive_whole_however_they_were_cut(frames, sizes):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(ours)
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
    due = list(responses)
    connection.notify()
    connection.send(ToBackend.PONG, b"x")
    writer = threading.Thread(target=connection.run_writer, args=(lambda everything: [due.pop(0) for _ in responses],))
    writer.start()
    bodies = []
    while True:
        kind, body = read_frame(theirs)
        if kind is ToBackend.PONG:
            break
        assert kind is ToBackend.RESPONSES
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
    threading.Thread(target=connection.run_writer, args=(lambda everything: [wire.final_flag(5)],), daemon=True).start()
    connection.notify()
    assert read_frame(theirs) == (ToBackend.RESPONSES, wire.final_flag(5))
    connection.close()


def test_a_writer_that_rests_takes_what_is_urgent_at_once_and_the_rest_once_in_time(ends, monkeypatch):
    connection, _theirs = ends
    asked = queue.SimpleQueue()

    def produce(everything):
        asked.put(everything)
        time.sleep(0.01)  # work to rest from
        return [wire.final_flag(int(everything))]

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
        return []

    monkeypatch.setattr(connection_module, "_REST_RATIO", 1e9)
    connection.rest_at_most(0.05)
    threading.Thread(target=connection.run_writer, args=(produce,), daemon=True).start()
    for _ in range(3):
        connection.notify(is_urgent=False)
        assert asked.get(timeout=PATIENCE_S)
    connection.close()


def test_a_lost_backend_ends_the_writer(ends):
    connection, theirs = ends
    writer = threading.Thread(target=connection.run_writer, args=(lambda everything: [wire.final_flag(1)],))
    writer.start()
    theirs.close()
    connection.notify()
    writer.join(PATIENCE_S)
    assert not writer.is_alive()


def test_a_socket_that_fails_is_in_the_log(caplog):
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    ours.setblocking(False)
    connection.send(ToBackend.DRAINING, bytes(8 << 20))
    with ours, theirs:
        connection.run_writer(nothing)
    assert "nothing more can be sent to the Triton backend" in caplog.text


def test_a_backend_that_hangs_up_is_no_error(ends, caplog):
    connection, backend = ends
    backend.close()
    connection.send(ToBackend.DRAINING, bytes(8 << 20))
    connection.run_writer(nothing)
    assert not caplog.text
