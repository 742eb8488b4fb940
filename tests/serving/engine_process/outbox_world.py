"""An outbox and requests over executors that commit what the test says, and what their clients get."""

import numpy as np

from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.serving.engine_process.model import ServedModel
from faser_trtllm.serving.engine_process.open_request import OpenRequest
from faser_trtllm.serving.engine_process.outbox import Outbox
from faser_trtllm.serving.engine_process.wire import RequestFrame
from faser_trtllm.serving.text.service import TextGenerator
from faser_trtllm.serving.triton.contract import FASER
from faser_trtllm.serving.triton.request import parse_request
from tests.support.backend_frames import read_responses
from tests.support.scripted_text import ScriptExecutor

OUTPUTS = ("text_output", "output_ids", "finish_reason", "output_is_draft", "num_output_tokens", "generation_logits")


class Ends:
    """ModelMetrics that remembers how requests ended."""

    def __init__(self):
        self.ends = []

    def ended(self, reason, error=None):
        self.ends.append(reason if error is None else error.code)


class World:
    """An outbox and requests over executors that commit what the test says."""

    def __init__(self, tokenizer):
        self.notified, self.cancelled, self.forgotten = [], [], []
        self.outbox = Outbox(self.notified.append)
        self.metrics = Ends()
        self.model = ServedModel(0, FASER, True, False, self.metrics, self.cancelled.append)
        self.tokenizer = tokenizer
        self.received = {}

    def start(self, handle, stream=True, **tensors):
        """Sequences of a request, each with the request that its executor has."""
        given = {"text_input": text("hello"), "max_tokens": ints(500), "stream": np.array([[stream]])} | tensors
        frame = RequestFrame(0, handle, "id", "\n".join(OUTPUTS).encode(), (), 100)
        siblings, found = [], []
        self.received[handle] = []
        for part in parse_request(given):
            executor = ScriptExecutor()
            generator = TextGenerator(executor, self.tokenizer)
            prepared = generator.prepare(part.request)
            request = OpenRequest(prepared, part, frame, self.model, siblings, self.outbox, self.forgotten.append)
            siblings.append(request)
            generator.start(request.id, prepared, request, request.fail)
            found.append((executor.request, request))
        return found

    def take(self, everything=True):
        for handle, is_final, outputs, error in read_responses(b"".join(self.outbox.take(everything))):
            answers = self.received[handle]
            assert not (answers and answers[-1][0]), "nothing follows the final response"
            answers.append((is_final, outputs, error))

    def text(self, handle):
        pieces = [outputs["text_output"][2][4:] for _, outputs, error in self.received[handle] if error is None]
        return b"".join(pieces).decode()

    def tokens(self, handle):
        ids = [outputs["output_ids"][2] for _, outputs, error in self.received[handle] if error is None]
        return np.frombuffer(b"".join(ids), np.int32).tolist()

    def error(self, handle):
        is_final, _, error = self.received[handle][-1]
        assert is_final
        return error


def text(*values):
    return np.array([[value.encode() for value in values]], object)


def ints(*values):
    return np.array([values], np.int32)


def floats(*values):
    return np.array([values], np.float32)


def put(sequence, ids, reason=None):
    request, sink = sequence
    return sink(RequestOutput(request, tuple(ids), reason))
