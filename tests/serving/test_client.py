"""The client library, with answers that no server of ours gives."""

import http.server
import threading

import pytest

from faser_trtllm.serving.client import ResponseError, generate_http, response_error, stream_http


@pytest.fixture
def server():
    """Answers each POST with the bytes in `answer`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.answer)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


ANSWERS = [
    b"",
    b"no JSON",
    b"\xff",
    b"[" * 200_000,
    b"true",
    b'{"output_ids": [[1], 2]}',
    b'{"finish_reason": 5}',
    b'{"num_input_tokens": []}',
    b'{"num_input_tokens": "many"}',
    b'{"output_ids": [1], "output_top_ids": [1, 2], "output_top_log_probs": [0.5]}',
]


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_an_answer_that_is_none_is_an_error(server, answer):
    url = f"http://127.0.0.1:{server.server_port}"
    server.answer = answer
    with pytest.raises(ResponseError, match="the server's answer is not one of the model faser"):
        generate_http(url, "a")
    server.answer = b"data: " + answer + b"\n\n"
    with pytest.raises(ResponseError, match="the server's answer is not one of the model faser"):
        list(stream_http(url, "a"))


def test_a_stream_without_a_last_response_is_an_error(server):
    """A connection that was cut between two events looks like the end of the stream."""
    url = f"http://127.0.0.1:{server.server_port}"
    begun, ended = b'data: {"text_output": "a"}\n\n', b'data: {"text_output": "b", "finish_reason": "stop"}\n\n'
    server.answer = begun + ended
    assert [response.text for response in stream_http(url, "a")] == ["a", "b"]
    server.answer = begun
    stream = stream_http(url, "a")
    assert next(stream).text == "a"
    with pytest.raises(ResponseError, match="the stream ended before its last response"):
        next(stream)


@pytest.mark.parametrize(
    "details",
    [
        "{}",
        '{"message": "m"}',
        '{"message": [], "code": "c"}',
        '{"message": "m", "code": 4}',
        '{"message": "m", "code": "c", "field": []}',
        "[" * 200_000,
    ],
    ids=["empty", "code", "list", "number", "field", "deep"],
)
def test_a_record_that_is_none_is_taken_for_a_sentence(details):
    error = response_error(details, "INTERNAL")
    assert (str(error), error.code) == (details, "INTERNAL")
