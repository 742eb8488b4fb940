"""The memory of a request that waits for its turn: at most 16 times its body and 4 MiB."""

import gc
import tracemalloc
from itertools import count

import numpy as np
import pytest

from faser_trtllm.core.request import Request
from faser_trtllm.serving.engine_process import wire
from faser_trtllm.serving.engine_process.open_request import OpenRequest
from faser_trtllm.serving.engine_process.wire import Body
from faser_trtllm.serving.text.service import TextGenerator
from faser_trtllm.serving.triton.request import MAX_RETURN_SEQUENCES
from tests.serving.engine_process.outbox_world import World, ints, text
from tests.support.backend_frames import request_body, texts_array
from tests.support.fake_engine import EchoExecutor

MAX_SEQ_LEN = 131_072
VOCAB_SIZE = 320


class Queue(EchoExecutor):
    """Takes requests as Executor does, and runs none."""

    def __init__(self):
        super().__init__(VOCAB_SIZE, MAX_SEQ_LEN)
        self.waiting = []

    def submit(self, request_id, prompt_token_ids, params, sink, *, priority=0.5, timeout_s=None, arrived_s=None):
        sizes = {"max_seq_len": self.max_seq_len, "max_draft_len": self.max_draft_len}
        request = Request(request_id, prompt_token_ids, params, **sizes, keep_candidates=True, keep_runners_up=True)
        self.waiting.append((request, sink))


def words(number, length):
    numbers = count()
    return [[f"{next(numbers):0{length}}".encode() for _ in range(number)]]


def sequences(number=MAX_RETURN_SEQUENCES):
    return {"num_return_sequences": ints(number), "temperature": np.array([[1.0]], np.float32)}


LONG_TEXT = text("ab cd " * 15_000)
CASES = {
    "prompt": {"text_input": text("hello")},
    "long output": {"text_input": text("hello"), "max_tokens": ints(MAX_SEQ_LEN)},
    "long text": {"text_input": LONG_TEXT},
    "long text, sequences": {"text_input": LONG_TEXT, "max_tokens": ints(MAX_SEQ_LEN)} | sequences(),
    "token ids, sequences": {"input_ids": np.arange(100_000, dtype=np.int32)[None] % VOCAB_SIZE} | sequences(),
    "stop words": {"text_input": text("a"), "stop_words": texts_array(words(64, 128))} | sequences(),
    "bad words": {"text_input": text("a"), "bad_words": texts_array(words(512, 15))} | sequences(),
    "bias words": {
        "text_input": text("a"),
        "embedding_bias_words": texts_array(words(1024, 64)),
        "embedding_bias_weights": np.ones((1, 1024), np.float32),
    }
    | sequences(),
    "biases": {
        "text_input": text("a"),
        "logit_bias_ids": np.arange(4096, dtype=np.int32)[None] % VOCAB_SIZE,
        "logit_bias_values": np.linspace(0, 1, 4096, dtype=np.float32)[None],
    }
    | sequences(),
    "guide": {
        "text_input": text("a"),
        "guided_decoding_guide_type": text("regex"),
        "guided_decoding_guide": text("a" * 60_000),
    },
    "batch": {
        "text_input": texts_array([[b"ab cd " * 1000]] * 64),
        "num_return_sequences": np.full((64, 1), 4, np.int32),
        "temperature": np.ones((64, 1), np.float32),
        "max_tokens": np.full((64, 1), MAX_SEQ_LEN, np.int32),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_waiting_request_takes_16_times_its_body_at_most(tokenizer, case):
    body = request_body(0, 1, "id", ("text_output",), list(CASES[case].items()))
    world, queue = World(tokenizer), Queue()
    generator = TextGenerator(queue, tokenizer)

    def submit(data):
        frame = wire.read_request(Body(memoryview(data)))
        siblings, prepared = [], None
        for part in world.model.parse(frame.tensors(world.model.check_input)):
            prepared = generator.prepare(part.request, like=prepared)
            siblings.append(OpenRequest(prepared, part, frame, world.model, siblings, world.outbox, [].append))
        for one in siblings:
            if one.prepared.request.guide() is None:
                generator.start(one.id, one.prepared, one, one.fail)
            else:
                queue.waiting.append(one)

    submit(body)  # what is kept once
    queue.waiting.clear()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        submit(bytes(body))
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before <= 16 * len(body) + (4 << 20)
