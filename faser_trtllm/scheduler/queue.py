"""Requests waiting for a slot: higher priority first, then the client that has been served least.

The order between clients is the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024, arXiv:2401.00588). A client's counter grows by the tokens that are computed for it, with the paper's
weights. The counter of a client that joins is raised to the least counter of the waiting clients, so a client gains
nothing by being idle, and new clients do not go before the client that has been served least. Requests of one client
are first come, first served.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict

from faser_trtllm.core.request import Request, RequestState

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""Weights of a prompt token that was not found in the KV cache, and of an output token."""

MIN_HEAP_SIZE = 64
"""Smaller heaps are not compacted."""

MAX_IDLE_CLIENTS = 1024
"""Clients without requests whose counters are kept while other clients have requests; the first to leave is dropped."""

_Waiting = tuple[float, int, Request]  # -priority, arrival number
_Rank = tuple[float, int, int, int, "_Client"]  # -priority, counter, arrival number of the next request, ...


class _Client:
    """A client with its counter. rank: its entry in the heap of clients; its other entries there are out of date."""

    __slots__ = ("is_counted", "key", "num_live", "num_waiting", "rank", "served", "waiting")

    def __init__(self, key: str) -> None:
        self.key = key
        self.served = 0  # its counter: weighted tokens
        self.waiting: list[_Waiting] = []  # a heap
        self.num_waiting = self.num_live = 0  # requests that have not ended: those in `waiting`, and all
        self.rank: _Rank | None = None
        self.is_counted = False

    def head(self) -> Request | None:
        """Return the client's next request, None if none waits."""
        while self.waiting and self.waiting[0][2].state is not RequestState.WAITING:
            heapq.heappop(self.waiting)
        return self.waiting[0][2] if self.waiting else None


class _Live:
    """A request that has not ended. num_tokens: how many of its tokens its client's counter includes."""

    __slots__ = ("client", "num_tokens", "number", "request", "was_admitted")

    def __init__(self, request: Request, number: int, client: _Client) -> None:
        self.request, self.number, self.client = request, number, client
        self.num_tokens = request.prompt_len
        self.was_admitted = False


class WaitingQueue:
    """Requests that wait for a slot.

    A preempted request keeps its arrival number, so it comes before later arrivals of its client.
    Operations take O(log n) per request, except charge(), which takes O(running requests) and does nothing for a single
    client, and take(), which takes O(waiting requests of the client).
    """

    def __init__(self, *, is_fair: bool = True) -> None:
        """is_fair: if False, all requests count as those of one client."""
        self._is_fair = is_fair
        self._live: dict[str, _Live] = {}
        self._running: dict[str, _Live] = {}
        self._clients: dict[str, _Client] = {}  # those with requests
        self._idle: OrderedDict[str, _Client] = OrderedDict()  # those without
        self._ranks: list[_Rank] = []
        self._counters: list[tuple[int, int, _Client]] = []  # counters, or lower values, of waiting clients
        self._last: _Client | None = None  # the client whose last waiting request was admitted most recently
        self._numbers, self._entries = itertools.count(), itertools.count()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_clients(self) -> int:
        """Number of clients whose counters are kept."""
        return len(self._clients) + len(self._idle)

    def push(self, request: Request) -> None:
        """Add a request, or put a preempted one back."""
        live = self._live.get(request.request_id)
        if live is None:
            live = _Live(request, next(self._numbers), self._client(request.params.client_key if self._is_fair else ""))
            self._live[request.request_id] = live
            live.client.num_live += 1
        client = live.client
        if self._running.pop(request.request_id, None) is not None:
            self._charge_output(live)
        if not client.num_waiting:
            self.charge()
            client.served = max(client.served, self._least_counter())
            if not client.is_counted:
                client.is_counted = True
                heapq.heappush(self._counters, (client.served, next(self._entries), client))
                self._compact()
        heapq.heappush(client.waiting, (-request.priority, live.number, request))
        client.num_waiting += 1
        self._num_waiting += 1
        self._rank(client)

    def charge(self) -> None:
        """Add the output tokens since the last call to the counters; call it once a step."""
        if self.num_clients > 1:
            for live in self._running.values():
                self._charge_output(live)

    def served(self, request: Request) -> int:
        """Return the counter of a request's client. The request must not have ended."""
        return self._live[request.request_id].client.served

    def peek(self) -> Request | None:
        """Return the next request, None if none waits."""
        while self._ranks:
            rank = self._ranks[0]
            client = rank[-1]
            head = client.head() if client.rank is rank else None
            if head is None:
                heapq.heappop(self._ranks)
                client.rank = None if client.rank is rank else client.rank
                continue
            now = client.waiting[0][0], client.served, client.waiting[0][1]
            if now == rank[:3]:
                return head
            client.rank = (*now, next(self._entries), client)
            heapq.heapreplace(self._ranks, client.rank)
        return None

    def pop(self) -> None:
        """Admit the request that peek() returned."""
        client = self._ranks[0][-1]
        self._admit(heapq.heappop(client.waiting)[2])

    def first(self, count: int) -> list[Request]:
        """Return at most `count` next requests, as if no prompt were in the KV cache; do not remove them."""
        found: list[tuple[_Client, _Waiting, int]] = []
        while len(found) < count and (request := self.peek()) is not None:
            client, cost = self._ranks[0][-1], self._cost(self._live[request.request_id])
            client.served += cost
            found.append((client, heapq.heappop(client.waiting), cost))
        for client, entry, cost in found:
            client.served -= cost
            heapq.heappush(client.waiting, entry)
        for client, _, _ in found:
            self._rank(client)
        return [request for _, (_, _, request), _ in found]

    def take(self, request: Request) -> None:
        """Admit a request, wherever it is in the queue."""
        client = self._live[request.request_id].client
        client.waiting = [entry for entry in client.waiting if entry[2] is not request]
        heapq.heapify(client.waiting)
        self._admit(request)

    def note_removed(self, request: Request) -> None:
        """Note that a waiting request has ended. Its entry is dropped when it reaches the top of the heap, or when half
        of the heap's requests have ended."""
        client = self._live[request.request_id].client
        client.num_waiting -= 1
        self._num_waiting -= 1
        if len(client.waiting) > 2 * client.num_waiting + MIN_HEAP_SIZE:
            client.waiting = [entry for entry in client.waiting if entry[2].state is RequestState.WAITING]
            heapq.heapify(client.waiting)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        live = self._live.pop(request.request_id)
        self._running.pop(request.request_id, None)
        client = live.client
        self._charge_output(live)
        client.num_live -= 1
        if not client.num_live:
            del self._clients[client.key]
            self._idle[client.key] = client
        if not self._live:
            self._idle.clear()  # no request is left, so all clients begin anew
            self._last = None
        elif len(self._idle) > MAX_IDLE_CLIENTS:
            self._idle.popitem(last=False)

    def _client(self, key: str) -> _Client:
        client = self._clients.get(key)
        if client is None:
            client = self._clients[key] = self._idle.pop(key) if key in self._idle else _Client(key)
        return client

    def _least_counter(self) -> int:
        """Return the least counter of the clients with waiting requests, or that of the last client that had one."""
        while self._counters:
            served, _, client = self._counters[0]
            if not client.num_waiting:
                client.is_counted = False
                heapq.heappop(self._counters)
            elif served < client.served:
                heapq.heapreplace(self._counters, (client.served, next(self._entries), client))
            else:
                return served
        return 0 if self._last is None else self._last.served

    def _rank(self, client: _Client) -> None:
        """Add an entry for a client that may come earlier than before; peek() moves those that come later."""
        if client.head() is None:
            return
        now = client.waiting[0][0], client.served, client.waiting[0][1]
        if client.rank is None or now < client.rank[:3]:
            client.rank = (*now, next(self._entries), client)
            heapq.heappush(self._ranks, client.rank)
            self._compact()

    def _compact(self) -> None:
        """Drop outdated entries from the heaps if most entries are outdated."""
        if max(len(self._ranks), len(self._counters)) <= 2 * len(self._clients) + MIN_HEAP_SIZE:
            return
        for client in [rank[-1] for rank in self._ranks] + [entry[-1] for entry in self._counters]:
            if not client.num_waiting:
                client.rank, client.is_counted = None, False
        self._ranks = [rank for rank in self._ranks if rank[-1].rank is rank]
        self._counters = [entry for entry in self._counters if entry[-1].is_counted]
        heapq.heapify(self._ranks)
        heapq.heapify(self._counters)

    def _admit(self, request: Request) -> None:
        live = self._live[request.request_id]
        client = live.client
        client.served += self._cost(live)
        live.was_admitted = True
        self._running[request.request_id] = live
        client.num_waiting -= 1
        self._num_waiting -= 1
        if not client.num_waiting:
            self._last = client

    @staticmethod
    def _cost(live: _Live) -> int:
        """Return what the admission of a request adds to its client's counter: its prompt, the first time only."""
        request = live.request
        return 0 if live.was_admitted else INPUT_WEIGHT * (request.prompt_len - request.num_computed_tokens)

    @staticmethod
    def _charge_output(live: _Live) -> None:
        num_tokens = live.request.num_tokens
        live.client.served += OUTPUT_WEIGHT * (num_tokens - live.num_tokens)
        live.num_tokens = num_tokens
