"""An engine process without engines: an executor that answers with the prompt's tokens, over and over.

Run as a module it is a drop-in for faser_trtllm.serving.engine_process.main.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from pathlib import Path

from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.core.request import FinishReason, Request
from faser_trtllm.errors import InvalidArgumentError, UnavailableError
from faser_trtllm.executor.admission import check_request
from faser_trtllm.executor.stats import Progress
from faser_trtllm.guided.compiler import GuideCompiler
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.engine_process.main import main

ENDLESS = 30_000  # output tokens that take 150 s or more: such a stream does not end by itself while a test looks at it
CRASH_TOKEN = 319  # a prompt with it kills the process
BUG_TOKEN = 317  # the second sequence of a prompt with it cannot start, as if the executor had a bug
HANG_TOKEN = 318  # a prompt with it stops the executor's thread, and no other
STEP_S = float(os.environ.get("FASER_FAKE_STEP_S", "0.01"))  # between two steps
TOKENS_PER_STEP = 2
MAX_REQUESTS = int(os.environ.get("FASER_FAKE_MAX_REQUESTS", "1000000"))
RELEASED = Path(os.environ["FASER_FAKE_RELEASED"]) if "FASER_FAKE_RELEASED" in os.environ else None
"""A file that the process makes when it releases guides, in place of releasing them."""


class EchoExecutor:
    """Same interface and threading as Executor; TOKENS_PER_STEP tokens per request and step."""

    def __init__(self, vocab_size=320, max_seq_len=512, step_s=STEP_S):
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.max_draft_len = 4
        self.tokens_per_block = 16
        self.submitted = deque(maxlen=16)  # for tests of one request; a process serves thousands
        self._step_s = step_s
        self._lock = threading.Lock()
        self._requests = {}
        self._draining = False
        self._num_steps = 0
        self._stepped_s = time.monotonic()
        self._before_pass = lambda: None

    def before_pass(self, call):
        self._before_pass = call

    def submit(self, request_id, prompt_token_ids, params, sink, *, priority=0.5, timeout_s=None, arrived_s=None):
        check_request(prompt_token_ids, params, vocab_size=self.vocab_size, max_seq_len=self.max_seq_len)
        if CRASH_TOKEN in prompt_token_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        if BUG_TOKEN in prompt_token_ids and request_id.endswith(".1"):
            raise RuntimeError("a bug on purpose")
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            max_seq_len=self.max_seq_len,
            max_draft_len=self.max_draft_len,
            arrival_s=time.perf_counter() if arrived_s is None else arrived_s,
            priority=priority,
        )
        self.submitted.append((request, timeout_s))
        with self._lock:
            if self._draining:
                raise UnavailableError("the server is shutting down; send the request to another one")
            if len(self._requests) >= MAX_REQUESTS:
                raise UnavailableError("no room")
            if request_id in self._requests:
                raise InvalidArgumentError("request id in use")
            self._requests[request_id] = (request, sink)

    def cancel(self, request_id):
        with self._lock:
            request, sink = self._requests.pop(request_id, (None, None))
        if request is not None:
            sink(RequestOutput(request, (), FinishReason.CANCELLED))
            self._before_pass()

    def start(self):
        threading.Thread(target=self._run, daemon=True).start()

    def drain(self, timeout_s):
        self._draining = True
        deadline_s = time.monotonic() + timeout_s
        while self._requests and time.monotonic() < deadline_s:
            time.sleep(0.005)
        return not self._requests

    def stats(self):
        return {"num_requests": float(len(self._requests))}

    def progress(self):
        return Progress(self._num_steps, bool(self._requests), time.monotonic() - self._stepped_s)

    def step(self):
        with self._lock:
            running = list(self._requests.values())
        if any(HANG_TOKEN in request.tokens[: request.prompt_len] for request, _ in running):
            time.sleep(60)
        for request, sink in running:
            num_tokens = min(TOKENS_PER_STEP, request.max_num_tokens - request.num_tokens)
            first = request.num_output_tokens
            new = tuple(int(request.tokens[(first + i) % request.prompt_len]) for i in range(num_tokens))
            request.num_tokens += num_tokens
            request.stats.num_steps += 1
            request.stats.num_draft_tokens += TOKENS_PER_STEP
            request.stats.num_accepted_tokens += num_tokens - 1
            request.stats.last_token_s = time.monotonic()
            if request.stats.first_token_s is None:
                request.stats.first_scheduled_s = request.stats.first_token_s = request.stats.last_token_s
            done = request.num_tokens >= request.max_num_tokens
            with self._lock:
                if request.request_id not in self._requests:
                    continue
            stopped = sink(RequestOutput(request, new, FinishReason.LENGTH if done else None))
            if done or stopped:
                with self._lock:
                    self._requests.pop(request.request_id, None)
        self._before_pass()

    def _run(self):
        while True:
            self.step()
            self._num_steps += 1
            self._stepped_s = time.monotonic()
            time.sleep(self._step_s)


def open_echo(engine_dir: Path, config):
    return EchoExecutor(max_seq_len=2 * ENDLESS), Tokenizer.load(engine_dir)


if __name__ == "__main__":
    if RELEASED:
        GuideCompiler.release = lambda compiler: RELEASED.touch()  # type: ignore[method-assign]
    main(opener=open_echo)
