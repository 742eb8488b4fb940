"""Send conversations in an open or a closed loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from benchmarks.serve.client import Client
from benchmarks.serve.dataset import Conversation
from benchmarks.serve.outcome import Outcome

_LEAD_S = 0.1  # between creating the tasks and the first arrival


class Load:
    """A run of conversations. default_len: max_tokens if the file has none."""

    def __init__(self, client: Client, conversations: Sequence[Conversation], default_len: int) -> None:
        self._client = client
        self._conversations = conversations
        self._default_len = default_len

    async def run_open(self, arrival_s: Sequence[float], max_concurrency: int | None) -> list[Outcome]:
        """Start each conversation at its time, and return the outcomes in order.

        At max_concurrency a conversation waits for one to end, and its times still count from its arrival.
        """
        slots = asyncio.Semaphore(max_concurrency or len(self._conversations))
        start_s = self._client.now_s() + _LEAD_S

        async def one(conversation: Conversation, due_s: float) -> list[Outcome]:
            await asyncio.sleep(max(0.0, due_s - self._client.now_s()))
            async with slots:
                return await self._talk(conversation, due_s)

        due = [start_s + after_s for after_s in arrival_s]
        return _flat(await asyncio.gather(*map(one, self._conversations, due)))

    async def run_closed(self, max_concurrency: int | None) -> list[Outcome]:
        """Keep max_concurrency conversations (None: all) running until all have run; each is due when it starts."""
        waiting = iter(enumerate(self._conversations))
        found: dict[int, list[Outcome]] = {}

        async def stream() -> None:
            for number, conversation in waiting:
                found[number] = await self._talk(conversation, self._client.now_s())

        num_streams = min(max_concurrency or math.inf, len(self._conversations))
        await asyncio.gather(*(stream() for _ in range(int(num_streams))))
        return _flat(found[number] for number in range(len(self._conversations)))

    async def _talk(self, conversation: Conversation, due_s: float) -> list[Outcome]:
        """Run the turns in order; each is due when the preceding answer has ended."""
        messages = list(conversation.history)
        outcomes: list[Outcome] = []
        for turn in conversation.turns:
            outcome = Outcome(due_s, conversation.category)
            outcomes.append(outcome)
            if len(outcomes) > 1 and outcomes[-2].error is not None:
                outcome.error = "the turn before it failed"
                outcome.sent_s = outcome.ended_s = due_s
                continue
            messages.append({"role": "user", "content": turn})
            text = await self._client.ask(messages, conversation.output_len or self._default_len, outcome)
            messages.append({"role": "assistant", "content": text})
            due_s = outcome.ended_s
        return outcomes


def _flat(found: object) -> list[Outcome]:
    return [outcome for outcomes in found for outcome in outcomes]  # type: ignore[attr-defined]
