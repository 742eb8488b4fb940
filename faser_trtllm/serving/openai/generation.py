"""Runs the sequences of one request concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType

from faser_trtllm.serving.client import Response
from faser_trtllm.serving.openai.model import Model
from faser_trtllm.serving.openai.request import GenerationRequest

_MAX_WAITING_DELTAS = 64


class Generation:
    """Runs a request inside `async with`; leaving it cancels the sequences that still run."""

    def __init__(self, source: Model, request_id: str, request: GenerationRequest, client_key: str = "") -> None:
        self._source = source
        self._client_key = client_key
        self._request_id = request_id
        self._sequences = request.sequences()
        # Bounded, so that a client that does not read blocks its own gRPC streams instead of filling memory.
        self._deltas: asyncio.Queue[tuple[int, Response | Exception]] = asyncio.Queue(_MAX_WAITING_DELTAS)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Generation:
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(len(self._sequences))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def deltas(self) -> AsyncIterator[tuple[int, Response]]:
        """Yield (index of the sequence, delta) until all sequences have ended; raise the first error."""
        num_open = len(self._sequences)
        while num_open:
            index, delta = await self._deltas.get()
            if isinstance(delta, Exception):
                raise delta
            num_open -= delta.finish_reason is not None
            yield index, delta

    async def _run(self, index: int) -> None:
        prompt, inputs = self._sequences[index]
        source = self._source.generate(f"{self._request_id}-{index}", prompt, inputs, self._client_key)
        try:
            async for delta in source:
                await self._deltas.put((index, delta))
        except Exception as error:
            await self._deltas.put((index, error))
        finally:
            await source.aclose()  # type: ignore[attr-defined]
