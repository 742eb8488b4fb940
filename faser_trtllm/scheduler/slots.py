"""The choice of a request to preempt so that clients share slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from faser_trtllm.core.request import Request
from faser_trtllm.kvcache.base import KVCache
from faser_trtllm.scheduler.queue import WaitingQueue


def slot_to_free(running: Sequence[Request], waiting: WaitingQueue, kv: KVCache) -> Request | None:
    """Return the request to preempt so that the next one in the queue can run, or None. running: in order of admission.

    It is the last admitted request of the client that holds most slots, at least two. The client of the next request
    must hold no slot and have been served less, and the next request must have no lower priority and need no more
    blocks. So one client may take all slots, but other clients do not wait until its requests end. A preempted request
    computes those tokens again whose blocks are no longer in the KV cache.
    """
    head = waiting.peek()
    if head is None or waiting.num_clients < 2:
        return None
    held = Counter(request.params.client_key for request in running)
    (key, num_held), *_ = held.most_common(1)
    if num_held < 2 or head.params.client_key in held:
        return None
    latest = next(request for request in reversed(running) if request.params.client_key == key)
    is_owed = latest.priority <= head.priority and waiting.served(head) < waiting.served(latest)
    fits = kv.num_blocks_for(head.max_num_tokens) <= kv.num_blocks_for(latest.max_num_tokens)
    return latest if is_owed and fits else None
