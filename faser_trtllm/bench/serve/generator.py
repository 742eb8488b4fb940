"""The load generator: gRPC requests to model `faser`, one stream each, in one asyncio loop.

Request tensors are built before the clock starts, and for a response only the timestamp and token ids are recorded;
text is ignored.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from faser_trtllm.bench.serve.outcome import Ending, Outcome
from faser_trtllm.bench.serve.workload import ServeJob
from faser_trtllm.errors import UnavailableError
from faser_trtllm.serving.client import MODEL_NAME, infer_input
from faser_trtllm.serving.text.finish_reason import read_finish

_LEAD_S = 0.1  # between creating the tasks and the first arrival


def run_open(url: str, jobs: Sequence[ServeJob], temperature: float, timeout_s: float) -> list[Outcome]:
    """Send each job at its arrival_s, regardless of earlier ones; returns outcomes in the order of the jobs.

    timeout_s: per request. Raises UnavailableError if no service answers at url.
    """
    return asyncio.run(_run(url, jobs, None, temperature, timeout_s))


def run_closed(url: str, jobs: Sequence[ServeJob], concurrency: int, timeout_s: float) -> list[Outcome]:
    """Keep `concurrency` greedy jobs in flight until all are sent; otherwise as run_open."""
    return asyncio.run(_run(url, jobs, concurrency, 0.0, timeout_s))


async def _run(
    url: str, jobs: Sequence[ServeJob], concurrency: int | None, temperature: float, timeout_s: float
) -> list[Outcome]:
    import tritonclient.grpc.aio as grpcclient

    client = grpcclient.InferenceServerClient(url)
    try:
        await _check_ready(client, url)
        requests = [_request(grpcclient, job, temperature) for job in jobs]
        return await _Load(client, jobs, requests, timeout_s).run(concurrency)
    finally:
        await client.close()


async def _check_ready(client: Any, url: str) -> None:
    from tritonclient.utils import InferenceServerException

    try:
        is_ready = await client.is_model_ready(MODEL_NAME, client_timeout=10)
    except InferenceServerException as error:
        raise UnavailableError(f"no service answers at {url} ({_sentence(error)}); start one or mend --url") from None
    if not is_ready:
        raise UnavailableError(f"model {MODEL_NAME} at {url} is not ready; wait until it is")


class _Load:
    """One run over a connection. requests: what stream_infer takes, by job."""

    def __init__(self, client: Any, jobs: Sequence[ServeJob], requests: list[dict[str, Any]], timeout_s: float) -> None:
        self._client = client
        self._jobs = jobs
        self._requests = requests
        self._timeout_s = timeout_s
        self._start_s = 0.0

    async def run(self, concurrency: int | None) -> list[Outcome]:
        numbers = range(len(self._jobs))
        if concurrency is None:
            self._start_s = time.perf_counter() + _LEAD_S
            return await asyncio.gather(*(self._send_when_due(number) for number in numbers))
        self._start_s = time.perf_counter()
        outcomes: dict[int, Outcome] = {}
        waiting = iter(numbers)

        async def stream() -> None:
            for number in waiting:
                outcomes[number] = await self._send(number, self._now_s())

        await asyncio.gather(*(stream() for _ in range(min(concurrency, len(numbers)))))
        return [outcomes[number] for number in numbers]

    async def _send_when_due(self, number: int) -> Outcome:
        due_s = self._jobs[number].arrival_s
        await asyncio.sleep(max(0.0, due_s - self._now_s()))
        return await self._send(number, due_s)

    async def _send(self, number: int, due_s: float) -> Outcome:
        import grpc

        outcome = Outcome(due_s=due_s, sent_s=self._now_s())
        is_stopped: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        requests = _until_stopped(self._requests[number], is_stopped)
        answers = self._client.stream_infer(requests, stream_timeout=self._timeout_s)
        try:
            await self._read(answers, outcome, self._jobs[number].cancel_after, is_stopped)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            self._end(outcome, error)
        finally:
            if not is_stopped.done():
                is_stopped.set_result(False)
        outcome.ended_s = outcome.ended_s or self._now_s()
        return outcome

    def _end(self, outcome: Outcome, error: Any) -> None:
        """Note how a call ended that did not end by itself."""
        if outcome.ending is Ending.CANCELLED:
            return
        # grpc says INTERNAL or cancels the call itself where the deadline meets the request's being sent.
        if self._now_s() - outcome.sent_s >= self._timeout_s:
            outcome.error = f"DEADLINE_EXCEEDED: the request took longer than {self._timeout_s:g} s"
        elif isinstance(error, asyncio.CancelledError):
            raise error
        else:
            outcome.error = f"{error.code().name}: {_sentence(error.details())}"

    async def _read(
        self, answers: Any, outcome: Outcome, cancel_after: int | None, is_stopped: asyncio.Future[bool]
    ) -> None:
        async for result, error in answers:
            now_s = self._now_s()
            if outcome.ended_s:
                continue  # what comes behind a cancellation
            if error is not None:
                outcome.error = _sentence(error)
                outcome.ended_s = now_s
                is_stopped.set_result(False)
                continue
            outcome.add_chunk(now_s, result.as_numpy("output_ids").reshape(-1).tolist())
            reason = result.as_numpy("finish_reason")
            if reason is not None:
                outcome.finish_reason, outcome.is_synthetic = read_finish(reason.reshape(-1)[0].decode())
                outcome.num_draft_tokens = _count(result, "total_draft_tokens")
                outcome.num_accepted_tokens = _count(result, "total_accepted_draft_tokens")
                outcome.ending = Ending.COMPLETED
                outcome.ended_s = now_s
                is_stopped.set_result(False)
            elif cancel_after is not None and outcome.num_tokens >= cancel_after:
                outcome.ending = Ending.CANCELLED
                outcome.ended_s = now_s
                is_stopped.set_result(True)
        if not outcome.ended_s:
            outcome.error = "the stream ended without a last response"

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s


async def _until_stopped(request: dict[str, Any], is_stopped: asyncio.Future[bool]) -> AsyncIterator[dict[str, Any]]:
    """The request, and one that stops it if that is asked for: Triton 2.51 may crash on streams that clients cancel
    (docs/engine_process.md)."""
    import tritonclient.grpc as grpcclient

    yield request
    if await is_stopped:
        yield {**request, "inputs": [*request["inputs"], infer_input(grpcclient, "stop", True)]}


def _request(grpcclient: Any, job: ServeJob, temperature: float) -> dict[str, Any]:
    fields = {"input_ids": job.prompt, "max_tokens": job.max_tokens, "temperature": temperature}
    fields |= {"end_id": -1, "stream": True}
    inputs = [infer_input(grpcclient, name, value) for name, value in fields.items()]
    return {"model_name": MODEL_NAME, "inputs": inputs, "request_id": uuid.uuid4().hex}


def _count(result: Any, name: str) -> int | None:
    array = result.as_numpy(name)
    return None if array is None else int(array.reshape(-1)[0])


def _sentence(error: object) -> str:
    message = error.message() if hasattr(error, "message") else str(error)
    return " ".join(str(message).split())
