"""The load of a soak: workers with one request each, most over gRPC streams, some over HTTP.

gRPC clients cancel as TensorRT-LLM's do, by a second request with `stop`; HTTP clients drop their connections. A gRPC
stream that its client cancels while a response is under way can end Triton 2.51 by a signal (docs/serve.md).
"""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from benchmarks.soak.jobs import Cancellation, Plan, Planner
from benchmarks.soak.ledger import RECONNECT_S, Answer, Ending, Ledger
from faser_trtllm.serving.client import MODEL_NAME, ResponseError, infer_input, stream_http

WORKERS_PER_CONNECTION = 8
CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", int(1e3 * RECONNECT_S / 2)),
    ("grpc.enable_http_proxy", 0),
]
_PAUSE_S = 0.1  # after a refusal while the engine child is down


class GrpcLoad:
    """gRPC workers with their own connections: one stream per request, all in one event loop."""

    def __init__(self, url: str, ledger: Ledger, timeout_s: float) -> None:
        self._url = url
        self._ledger = ledger
        self._timeout_s = timeout_s

    def run(self, planners: list[Planner], stop: threading.Event) -> None:
        """Send requests until stop is set and every request has ended."""
        asyncio.run(self._run(planners, stop))

    async def _run(self, planners: list[Planner], stop: threading.Event) -> None:
        import tritonclient.grpc.aio as grpcclient

        clients = [
            grpcclient.InferenceServerClient(self._url, channel_args=CHANNEL_OPTIONS)
            for _ in range(-(-len(planners) // WORKERS_PER_CONNECTION))
        ]
        try:
            await asyncio.gather(
                *(self._work(clients[i // WORKERS_PER_CONNECTION], planner, stop) for i, planner in enumerate(planners))
            )
        finally:
            for client in clients:
                await client.close()

    async def _work(self, client: Any, planner: Planner, stop: threading.Event) -> None:
        while not stop.is_set():
            plan = planner.next(self._ledger.usual_s)
            answer = await self._ask(client, plan)
            if self._ledger.close("grpc", plan, answer) is Ending.LOST:
                await asyncio.sleep(_PAUSE_S)

    async def _ask(self, client: Any, plan: Plan) -> Answer:
        import grpc

        answer = Answer(time.monotonic())
        is_stopped: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # Without the header triton_grpc_error, since streams that end in errors then crash Triton 2.51.
        answers = client.stream_infer(_requests(plan.fields, is_stopped), stream_timeout=self._timeout_s)
        timer = None
        if plan.cancellation is not None and plan.cancellation.after_s is not None:
            timer = asyncio.get_running_loop().call_later(plan.cancellation.after_s, _stop, is_stopped, answer)
        try:
            await self._read(answers, answer, plan.cancellation, is_stopped)
        except grpc.aio.AioRpcError as error:
            answer.error = f"{error.code().name} {' '.join((error.details() or '').split())}"
        finally:
            if timer is not None:
                timer.cancel()
            if not is_stopped.done():
                is_stopped.set_result(False)
        answer.ended_s = time.monotonic()
        return answer

    async def _read(
        self, answers: Any, answer: Answer, cancellation: Cancellation | None, is_stopped: asyncio.Future[bool]
    ) -> None:
        num_responses = 0
        async for result, error in answers:
            if error is not None:
                answer.error = str(error.message())
                is_over = True
            else:
                is_over = self._take(result, answer)
            num_responses += 1
            if is_over and not is_stopped.done():
                is_stopped.set_result(False)
            elif cancellation is not None and num_responses == cancellation.after_responses:
                _stop(is_stopped, answer)

    def _take(self, result: Any, answer: Answer) -> bool:
        """Add a response to the answer; return True if it is the last."""
        if answer.first_s is None:
            answer.first_s = time.monotonic()
            self._ledger.first_token(answer)
        answer.text += result.as_numpy("text_output").reshape(-1)[0].decode()
        answer.num_tokens += result.as_numpy("output_ids").size
        reason = result.as_numpy("finish_reason")
        if reason is None:
            return False
        answer.finish_reason = reason.reshape(-1)[0].decode()
        answer.was_cancelled &= answer.finish_reason == "cancelled"  # otherwise the stop was too late
        return True


class HttpWorker:
    """A worker with sequential HTTP requests, each on its own connection, which it drops to cancel."""

    def __init__(self, url: str, ledger: Ledger, timeout_s: float, planner: Planner) -> None:
        self._url = url
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._planner = planner

    def run(self, stop: threading.Event) -> None:
        """Send requests until stop is set."""
        while not stop.is_set():
            plan = self._planner.next(self._ledger.usual_s)
            if self._ledger.close("http", plan, self._ask(plan)) is Ending.LOST:
                stop.wait(_PAUSE_S)

    def _ask(self, plan: Plan) -> Answer:
        answer = Answer(time.monotonic())
        cancellation = plan.cancellation or Cancellation()
        timeout_s = self._timeout_s if cancellation.after_s is None else cancellation.after_s
        try:
            self._read(stream_http(self._url, timeout_s=timeout_s, **plan.fields), answer, cancellation)
        except ResponseError as error:
            answer.error = str(error)
        except (OSError, http.client.HTTPException) as error:
            is_timeout = isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)
            answer.was_cancelled = is_timeout and cancellation.after_s is not None
            answer.error = None if answer.was_cancelled else f"{type(error).__name__}: {error}"
        answer.ended_s = time.monotonic()
        return answer

    def _read(self, responses: Any, answer: Answer, cancellation: Cancellation) -> None:
        for number, response in enumerate(responses, 1):
            now_s = time.monotonic()
            if answer.first_s is None:
                answer.first_s = now_s
                self._ledger.first_token(answer)
            answer.text += response.text
            answer.num_tokens += len(response.token_ids)
            answer.finish_reason = response.finish_reason
            is_late = cancellation.after_s is not None and now_s - answer.sent_s > cancellation.after_s
            if response.finish_reason is None and (is_late or number == cancellation.after_responses):
                answer.was_cancelled = True
                responses.close()
                return


def _stop(is_stopped: asyncio.Future[bool], answer: Answer) -> None:
    if not is_stopped.done():
        answer.was_cancelled = True
        is_stopped.set_result(True)


async def _requests(fields: Mapping[str, Any], is_stopped: asyncio.Future[bool]) -> AsyncIterator[dict[str, Any]]:
    """Yield a request, and one that stops it if it is cancelled; the stream stays open until its end."""
    request_id = uuid.uuid4().hex
    yield _grpc_request(fields, request_id)
    if await is_stopped:
        yield _grpc_request({"text_input": "", "stop": True}, request_id)


def _grpc_request(fields: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    import tritonclient.grpc as grpcclient

    inputs = [infer_input(grpcclient, name, value) for name, value in fields.items()]
    return {"model_name": MODEL_NAME, "inputs": inputs, "request_id": request_id}
