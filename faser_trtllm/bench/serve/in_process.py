"""The same requests on an executor in this process, as in `faser generate`, `concurrency` at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from faser_trtllm.bench.serve.outcome import Ending, Outcome
from faser_trtllm.bench.serve.workload import ServeJob
from faser_trtllm.errors import FaserError
from faser_trtllm.executor.executor import Executor
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.text.request import TextOutput, TextRequest
from faser_trtllm.serving.text.service import TextGenerator


class InProcess:
    """Steps an executor in the calling thread, with the same text processing as the service."""

    def __init__(self, executor: Executor, tokenizer: Tokenizer) -> None:
        self._executor = executor
        self._generator = TextGenerator(executor, tokenizer)
        self._num_requests = 0

    def run_closed(self, jobs: Sequence[ServeJob], concurrency: int) -> list[Outcome]:
        """Keep `concurrency` greedy jobs in flight until all are sent; returns outcomes in the order of the jobs."""
        outcomes: list[Outcome] = []
        start_s = time.perf_counter()
        num_running = 0

        def take(outcome: Outcome, output: TextOutput) -> None:
            nonlocal num_running
            now_s = time.perf_counter() - start_s
            outcome.add_chunk(now_s, list(output.token_ids))
            if output.is_final:
                num_running -= 1
                outcome.ended_s = now_s
                outcome.finish_reason = output.finish_reason
                outcome.error = None if output.error is None else str(output.error)
                if output.error is None:
                    outcome.ending = Ending.COMPLETED

        while len(outcomes) < len(jobs) or num_running:
            while len(outcomes) < len(jobs) and num_running < concurrency:
                job = jobs[len(outcomes)]
                now_s = time.perf_counter() - start_s
                outcomes.append(Outcome(due_s=now_s, sent_s=now_s))
                request = TextRequest(
                    token_ids=job.prompt, max_tokens=job.max_tokens, temperature=0.0, end_ids=(), stream=True
                )
                self._num_requests += 1
                num_running += 1
                self._generator.submit(str(self._num_requests), request, partial(take, outcomes[-1]))
            if not self._executor.step():
                raise FaserError("the executor is idle, but a request has not ended")
        return outcomes
