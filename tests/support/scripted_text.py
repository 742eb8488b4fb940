"""Text over an executor that commits what the test says."""

from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.core.request import FinishReason, Request
from faser_trtllm.executor.admission import check_request
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.text.service import TextGenerator
from tests.support.fake_engine import EchoExecutor


class ScriptExecutor(EchoExecutor):
    """Remembers the sink; the test says what the engine commits."""

    def submit(self, request_id, prompt_token_ids, params, sink, *, priority=0.5, timeout_s=None, arrived_s=None):
        check_request(prompt_token_ids, params, vocab_size=self.vocab_size, max_seq_len=self.max_seq_len)
        self.request = Request(request_id, prompt_token_ids, params, max_seq_len=self.max_seq_len, max_draft_len=4)
        self.sink = sink
        self.timeout_s = timeout_s


def run(tokenizer, chunks, reason=FinishReason.LENGTH, stream_interval=1, **fields):
    """Feed the chunks of token ids; the outputs, and whether the sink asked to stop."""
    executor = ScriptExecutor()
    outputs = []
    request = TextRequest(**{"text": "hello", "max_tokens": 500} | fields)
    TextGenerator(executor, tokenizer, stream_interval).submit("r", request, outputs.append)
    for chunk in chunks:
        if executor.sink(RequestOutput(executor.request, tuple(chunk))):
            return outputs, True
    stopped = executor.sink(RequestOutput(executor.request, (), reason))
    return outputs, stopped


def joined(outputs):
    return (
        "".join(o.text for o in outputs),
        [t for o in outputs for t in o.token_ids],
        outputs[-1].finish_reason,
    )


def cut(items, sizes):
    chunks, start = [], 0
    for size in [*sizes, len(items)]:
        chunks.append(items[start : start + size])
        start += size
    return [chunk for chunk in chunks if chunk]
