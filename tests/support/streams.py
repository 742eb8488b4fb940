"""Streams read in the background, so that a test can do something to the server meanwhile."""

import queue
import threading

from faser_trtllm.serving.client import GrpcClient, ResponseError, stream_http
from tests.support.waiting import PATIENCE_S


class Answer:
    """A stream over HTTP or gRPC, read in a thread: its text, and how it ended."""

    def __init__(self, server, max_tokens, http=False):
        self.text, self.error, self.finish_reason = "", None, None
        self.started = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(server, max_tokens, http))
        self._thread.start()

    def _read(self, server, max_tokens, http):
        try:
            if http:
                self._take(stream_http(server.http_url, "abc", max_tokens=max_tokens))
                return
            with GrpcClient(server.grpc_url) as client:
                self._take(client.stream("abc", max_tokens=max_tokens))
        except (ResponseError, OSError, queue.Empty) as error:
            self.error = error
        finally:
            self.started.set()

    def _take(self, responses):
        for response in responses:
            self.text += response.text
            self.finish_reason = response.finish_reason
            self.started.set()

    def wait(self):
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the stream did not end"
        return self
