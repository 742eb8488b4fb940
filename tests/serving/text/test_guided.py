"""Guides on their way to the executor: compiled beside the other requests, cancelled, late, wrong."""

import sys
import threading
import time
import weakref

import pytest

from faser_trtllm.errors import InvalidArgumentError, UnavailableError
from faser_trtllm.guided.spec import GuideSpec
from faser_trtllm.serving.text import guide_queue
from faser_trtllm.serving.text.guide_queue import GuideQueue
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.text.service import TextGenerator
from tests.support.fake_engine import EchoExecutor
from tests.support.waiting import wait_until

WAIT_S = 20


class GatedCompiler:
    """Compiles when the test says so; the guide is the spec's text. What begins with "slow" takes more than any budget
    but the last, for which another gate opens."""

    def __init__(self):
        self.gate = threading.Event()
        self.slow_gate = threading.Event()
        self.started = threading.Event()
        self.compiled = []
        self.client_keys = []
        self.ready = {}

    def find(self, spec):
        return self.ready.get(spec)

    def compile_quickly(self, spec, budget_s, client_key):
        self.client_keys.append(client_key)
        self.started.set()
        assert self.gate.wait(WAIT_S)
        return None if spec.guide.startswith("slow") else self._compile(spec)

    def compile(self, spec, client_key):
        self.client_keys.append(client_key)
        assert self.slow_gate.wait(WAIT_S)
        return self._compile(spec)

    def _compile(self, spec):
        self.compiled.append(spec.guide)
        if spec.guide == "wrong":
            raise InvalidArgumentError("guided_decoding_guide is wrong")
        if spec.guide == "bug":
            raise ZeroDivisionError
        return self.ready.setdefault(spec, spec.guide)


class Case:
    """A generator over an executor that echoes, whose compiler waits for the gate."""

    def __init__(self, tokenizer):
        self.executor = EchoExecutor()
        self.compiler = GatedCompiler()
        self.generator = TextGenerator(self.executor, tokenizer)
        self.generator._guides = GuideQueue(self.compiler)
        self.outputs = {}
        self.ended = {}

    def submit(self, request_id, guide=None, **fields):
        outputs, ended = self.outputs.setdefault(request_id, []), self.ended.setdefault(request_id, threading.Event())

        def collect(output):
            outputs.append(output)
            if output.is_final:
                ended.set()

        guided = {} if guide is None else {"guided_decoding_guide_type": "regex", "guided_decoding_guide": guide}
        request = TextRequest(text="hello", max_tokens=4, **guided, **fields)
        self.generator.submit(request_id, request, collect)

    def last(self, request_id):
        deadline_s = time.monotonic() + WAIT_S
        while not self.ended[request_id].wait(0.005):
            self.executor.step()
            assert time.monotonic() < deadline_s
        return self.outputs[request_id][-1]


@pytest.fixture
def case(tokenizer):
    case = Case(tokenizer)
    yield case
    case.compiler.gate.set()
    case.compiler.slow_gate.set()


def test_others_go_on_while_a_guide_is_compiled(case):
    case.submit("guided", "a+")
    assert case.compiler.started.wait(WAIT_S)
    case.submit("plain")
    assert case.last("plain").finish_reason == "length"
    assert case.outputs["guided"] == []
    case.compiler.gate.set()
    assert case.last("guided").finish_reason == "length"
    guides = {request.request_id: request.params.guide for request, _ in case.executor.submitted}
    assert guides == {"plain": None, "guided": "a+"}


def test_a_guide_is_compiled_for_the_client_that_asked_first(case):
    for client_key in ("a", "b"):
        case.submit(client_key, "slow", client_key=client_key)
    for gate in (case.compiler.gate, case.compiler.slow_gate):
        gate.set()
    assert [case.last(client_key).finish_reason for client_key in ("a", "b")] == ["length"] * 2
    assert case.compiler.client_keys == ["a"] * 3


def test_a_guide_that_is_there_does_not_wait(case):
    case.compiler.ready[GuideSpec("regex", "a+")] = "a+"
    case.submit("r", "a+")
    assert [request.params.guide for request, _ in case.executor.submitted] == ["a+"]


def test_a_request_is_cancelled_while_its_guide_is_compiled(case):
    case.submit("first", "a+")
    assert case.compiler.started.wait(WAIT_S)
    case.submit("second", "b+")
    for request_id in ("second", "first"):
        case.generator.cancel(request_id)
        (output,) = case.outputs[request_id]
        assert (output.finish_reason, output.error) == ("cancelled", None)
        assert output.statistics.num_input_tokens > 0
    case.submit("third", "c+")
    case.compiler.gate.set()
    assert case.last("third").finish_reason == "length"
    assert [request.request_id for request, _ in case.executor.submitted] == ["third"]
    assert GuideSpec("regex", "b+") not in case.compiler.ready, "nobody wanted it any more"


def test_cancelling_reaches_a_request_that_runs(case):
    case.compiler.gate.set()
    case.submit("r", "a+")
    wait_until(lambda: case.executor.submitted)
    case.generator.cancel("r")
    assert case.last("r").finish_reason == "cancelled"


@pytest.mark.parametrize(
    ("guide", "code", "message"),
    [
        ("wrong", "INVALID_ARG", "guided_decoding_guide is wrong"),
        ("bug", "INTERNAL", "the guide failed with ZeroDivisionError; see the server's log"),
    ],
)
def test_a_wrong_guide_is_the_request_s_only_output(case, guide, code, message):
    case.compiler.gate.set()
    case.submit("r", guide)
    output = case.last("r")
    assert (output.finish_reason, output.error.code, str(output.error)) == ("error", code, message)
    assert len(case.outputs["r"]) == 1
    assert not case.executor.submitted


def test_an_executor_that_refuses_late_is_heard(case):
    case.submit("r", "a+")
    case.executor.drain(0)
    case.compiler.gate.set()
    assert case.last("r").error.code == "UNAVAILABLE"


def test_waiting_for_a_guide_counts_for_the_timeout(case):
    sent_s = time.perf_counter()
    case.submit("r", "a+", timeout_ms=60_000.0)
    assert case.compiler.started.wait(WAIT_S)
    started_s = time.perf_counter()
    case.compiler.gate.set()
    case.last("r")
    ((request, timeout_s),) = case.executor.submitted
    assert sent_s <= request.arrival_s <= started_s
    assert timeout_s == 60.0


def test_the_wait_before_a_guide_counts_for_the_timeout(case):
    """Long prompts wait for a thread that tokenizes them."""
    case.submit("others", "a+")
    assert case.compiler.started.wait(WAIT_S)
    failed, guided = [], {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "b+"}
    prepared = case.generator.prepare(TextRequest(text="hello", timeout_ms=60_000.0, **guided))
    case.generator.start("r", prepared, lambda output: False, failed.append, time.perf_counter() - 60.0)
    wait_until(lambda: failed)
    assert str(failed[0]).startswith("the request timed out in the queue, timeout_ms is 60000")


def test_a_deadline_ends_the_wait_for_a_guide(case):
    """Compiling others' guides may take minutes."""
    case.submit("others", "a+")
    assert case.compiler.started.wait(WAIT_S)
    case.submit("r", "b+", timeout_ms=20.0)
    output = case.last("r")
    assert str(output.error) == "the request timed out in the queue, timeout_ms is 20; try again later or raise it"
    assert output.error.code == "UNAVAILABLE"
    case.compiler.gate.set()
    assert case.last("others").finish_reason == "length"
    assert len(case.outputs["r"]) == 1


def test_a_deadline_ends_the_wait_for_a_guide_that_others_wanted_first(case):
    case.submit("first", "a+")
    assert case.compiler.started.wait(WAIT_S)
    case.generator.cancel("first")
    case.submit("r", "a+", timeout_ms=20.0)
    assert "timed out in the queue" in str(case.last("r").error)


def test_one_thread_ends_all_late_requests_while_there_are_some(case):
    def wait_for(wanted):
        """Wait for this number, since an earlier test's thread may not have ended yet."""
        deadline_s = time.monotonic() + WAIT_S
        while (found := [t.name for t in threading.enumerate()].count("faser-guides-timeouts")) != wanted:
            assert time.monotonic() < deadline_s, found
            time.sleep(0.005)

    wait_for(0)
    for number in range(100):
        case.submit(f"r{number}", "a+", timeout_ms=60_000.0)
    assert [t.name for t in threading.enumerate()].count("faser-guides-timeouts") == 1
    for number in range(100):
        case.generator.cancel(f"r{number}")
    wait_for(0)
    case.submit("late", "a+", timeout_ms=20.0)
    assert "timed out in the queue" in str(case.last("late").error)


def test_only_so_many_wait_and_the_oldest_goes(case, monkeypatch):
    monkeypatch.setattr(guide_queue, "MAX_WAITING_GUIDES", 2)
    case.generator._guides = GuideQueue(case.compiler)
    case.submit("first", "a+")
    assert case.compiler.started.wait(WAIT_S)
    for name in ("b", "c", "d"):
        case.submit(name, f"{name}+")
    refused = case.last("b")
    assert refused.error.code == "UNAVAILABLE"
    assert str(refused.error) == "2 guides are waiting to be compiled, the limit; try again later"
    with pytest.raises(InvalidArgumentError, match="request id 'd' is already in use"):
        case.submit("d", "e+")
    case.compiler.gate.set()
    assert [case.last(name).finish_reason for name in ("first", "c", "d")] == ["length"] * 3


def test_a_waiting_thread_keeps_no_guide_alive():
    """A compiled guide can take 100 MiB."""

    class Compiled:
        def find(self, spec):
            return None

        def compile_quickly(self, spec, budget_s, client_key):
            return Compiled()

    alive, done = weakref.WeakSet(), threading.Event()

    def take(guide):
        alive.add(guide)
        done.set()

    GuideQueue(Compiled()).submit("1", GuideSpec("regex", "a+"), take, lambda error: None)
    assert done.wait(WAIT_S)
    deadline_s = time.monotonic() + WAIT_S
    while alive:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_guide_waits_for_no_slow_one(case):
    """Slow guides that wait for each other for minutes must not block guided decoding for others."""
    case.compiler.gate.set()
    for i in range(64):
        case.submit(f"slow{i}", f"slow{i}")
    case.submit("plain", "a+")
    assert case.last("plain").finish_reason == "length"
    assert case.compiler.compiled == ["a+"]
    case.compiler.slow_gate.set()
    for i in range(64):
        assert case.last(f"slow{i}").finish_reason == "length"


def test_requests_with_the_same_guide_wait_for_one_compilation(case):
    for i in range(256):
        case.submit(f"r{i}", "slow")
    with pytest.raises(UnavailableError, match="256 guides are waiting"):
        case.submit("r256", "slow")
    case.compiler.gate.set()
    case.compiler.slow_gate.set()
    assert [case.last(f"r{i}").finish_reason for i in range(256)] == ["length"] * 256
    assert case.compiler.compiled == ["slow"]


def test_a_server_without_the_package_says_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    case = Case(tokenizer)
    case.generator = TextGenerator(case.executor, tokenizer)
    case.submit("r", "a+")
    output = case.last("r")
    assert output.error.code == "INVALID_ARG"
    assert "run pip install -c constraints.txt -e '.[guided]'" in str(output.error)
