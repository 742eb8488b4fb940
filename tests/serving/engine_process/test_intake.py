"""Requests are read next to each other, and a cancellation reaches one that is still to be read."""

import threading

from faser_trtllm.serving.engine_process.intake import MAX_INLINE_BYTES, NUM_THREADS, Intake, Mark
from faser_trtllm.serving.engine_process.wire import RequestFrame
from tests.support.waiting import PATIENCE_S, wait_until

LARGE = MAX_INLINE_BYTES + 1


def frame(handle, num_bytes):
    return RequestFrame(0, handle, "id", b"", (), num_bytes)


class Reader:
    """Notes which requests were read; those of `held` wait until they are let go."""

    def __init__(self, held=()):
        self.held = {handle: threading.Event() for handle in held}
        self.begun, self.read, self.marks = [], [], []
        self.intake = Intake(self)

    def __call__(self, frame):
        self.begun.append(frame.handle)
        if frame.handle in self.held:
            assert self.held[frame.handle].wait(PATIENCE_S)
        self.read.append(frame.handle)
        self.marks.append((frame.handle, self.intake.take_mark(frame.handle)))


def test_small_requests_do_not_wait_for_large_ones():
    reader = Reader(held=range(NUM_THREADS + 1))
    for handle in reader.held:
        reader.intake.put(frame(handle, LARGE))
    for handle in range(10, 20):
        reader.intake.put(frame(handle, MAX_INLINE_BYTES))
    assert reader.read == list(range(10, 20))
    for event in reader.held.values():
        event.set()
    wait_until(lambda: len(reader.read) == 10 + len(reader.held))


def test_a_smaller_request_does_not_wait_for_many_larger_ones():
    reader = Reader(held=range(NUM_THREADS))
    for handle in reader.held:
        reader.intake.put(frame(handle, 100 * LARGE))
    wait_until(lambda: len(reader.begun) == NUM_THREADS)
    for handle in (5, 6, 7):
        reader.intake.put(frame(handle, 100 * LARGE))
    reader.intake.put(frame(8, LARGE))
    reader.held[0].set()
    wait_until(lambda: 7 in reader.read)
    assert reader.read == [0, 8, 5, 6, 7], "those of one size are read as they came"
    reader.held[1].set()
    wait_until(lambda: 1 in reader.read)


def test_a_request_that_was_cancelled_before_it_was_read_is_cancelled_after_it():
    reader = Reader(held=(1, 2))
    for handle in reader.held:
        reader.intake.put(frame(handle, LARGE))
    assert reader.intake.cancel(1)
    assert not reader.intake.cancel(3), "none of this handle waits"
    for event in reader.held.values():
        event.set()
    wait_until(lambda: sorted(reader.read) == [1, 2])
    wait_until(lambda: sorted(reader.marks) == [(1, Mark.CANCELLED), (2, None)])
    assert not reader.intake.cancel(2), "whoever cancels now asks those that run"


def test_a_stop_reaches_the_queued_requests_of_its_client_and_id():
    reader = Reader(held=range(6))
    names = [(0, "id", ""), (0, "id", ""), (0, "other", ""), (0, "id", "client"), (1, "id", ""), (0, "id", "")]
    for handle, (model, request_id, client_key) in enumerate(names):
        reader.intake.put(RequestFrame(model, handle, request_id, b"", (), LARGE, client_key))
    reader.intake.cancel(5)
    reader.intake.stop(0, ("", "id"))
    for event in reader.held.values():
        event.set()
    wait_until(lambda: len(reader.marks) == 6)
    assert dict(reader.marks) == {0: Mark.STOPPED, 1: Mark.STOPPED, 2: None, 3: None, 4: None, 5: Mark.CANCELLED}
