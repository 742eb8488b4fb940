"""Bounds the memory of open requests, and returns memory to the system after a burst of them."""

from __future__ import annotations

import ctypes
import threading

from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import UnavailableError

BYTES_PER_BODY_BYTE = 8  # for the text, its tokens and the objects made from its words
BYTES_PER_SEQUENCE = 8 << 10
BYTES_PER_LOG_PROB = 48
BYTES_PER_TOPS = 640  # a token's most probable tokens, with their arrays
BYTES_PER_LOGITS_ROW = 128  # in addition to its numbers
BYTES_PER_PREDICTED_TOKEN = 256  # in the automaton that searches the prediction
MIN_TRIMMED_BYTES = 16 << 20  # while requests are open


class RequestMemory:
    """Bounds the memory of all open requests, by handle. Thread-safe.

    It counts the most that a request can take, which is more than it does take: BYTES_PER_BODY_BYTE for each byte of
    its body on arrival, plus later calls of take(). A client may take half of the memory that other clients leave, so
    that heavy clients leave room for light ones. A request without a client key counts as a client of its own.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._taken: dict[int, tuple[str | int, int]] = {}  # handle -> client, bytes
        self._of_clients: dict[str | int, int] = {}
        self._num_bytes = 0
        self._highest = 0  # the largest _num_bytes since memory was last given back

    def take(self, handle: int, num_bytes: int, client_key: str = "") -> None:
        """Count num_bytes more for a request; raise UnavailableError if its client would exceed its share."""
        client = client_key or handle
        with self._lock:
            own = self._of_clients.get(client, 0)
            left = max(0, (self.limit - self._num_bytes + own) // 2 - own)
            if num_bytes > left:
                raise UnavailableError(
                    f"the request takes up to {num_bytes} more bytes of memory, but its client may take only {left} "
                    f"more, since each client gets half of what others leave of max_queue_bytes ({self.limit}); try "
                    "again later, or ask for less"
                )
            self._taken[handle] = client, self._taken.get(handle, (client, 0))[1] + num_bytes
            self._of_clients[client] = own + num_bytes
            self._num_bytes += num_bytes
            self._highest = max(self._highest, self._num_bytes)

    def release(self, handle: int) -> None:
        """Release the bytes of a request that has ended, if it holds any."""
        with self._lock:
            client, num_bytes = self._taken.pop(handle, ("", 0))
            self._num_bytes -= num_bytes
            if num_bytes:
                self._of_clients[client] -= num_bytes
                if not self._of_clients[client]:
                    del self._of_clients[client]

    def trim(self) -> None:
        """Return free memory to the system if requests hold MIN_TRIMMED_BYTES less than at the last peak, or once after
        all requests have ended."""
        with self._lock:
            least = MIN_TRIMMED_BYTES if self._taken else 1
            if self._highest - self._num_bytes < least:
                return
            self._highest = self._num_bytes
        _trim_heap()


def sequence_bytes(params: SamplingParams, prompt_len: int, num_output: int, vocab_size: int) -> int:
    """Return the most bytes that a sequence of num_output output tokens takes, with its log probs and logits."""
    log_prob = BYTES_PER_LOG_PROB + (BYTES_PER_TOPS if params.num_top_log_probs else 0)
    num_log_probs = num_output * params.return_log_probs + prompt_len * params.return_context_log_probs
    num_rows = num_output * params.return_generation_logits
    num_bytes = BYTES_PER_SEQUENCE + BYTES_PER_PREDICTED_TOKEN * len(params.prediction)
    return num_bytes + num_log_probs * log_prob + num_rows * (BYTES_PER_LOGITS_ROW + 4 * vocab_size)


def _trim_heap() -> None:
    """Make glibc return freed memory to the system; other allocators lack the function."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
