"""The service loop: schedule, draft, verify, update, for all requests in flight.

One thread runs step(); any thread may submit and cancel. The executor knows token ids, not text or sockets.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

from faser_trtllm.core.clock import Clock
from faser_trtllm.core.closing import Closing
from faser_trtllm.core.plan import OutputEnd, RequestOutput, SchedulerOutput, StepRecord
from faser_trtllm.core.request import FinishReason, Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.drafters.base import Drafter
from faser_trtllm.errors import ConfigError, InvalidArgumentError, UnavailableError
from faser_trtllm.executor.admission import Admission
from faser_trtllm.executor.draft_worker import DraftWorker
from faser_trtllm.executor.slow_steps import SlowSteps
from faser_trtllm.executor.stats import ExecutorStats, Progress, StepWatcher
from faser_trtllm.executor.verifier import Verifier
from faser_trtllm.kvcache.base import BlockListener
from faser_trtllm.sampling.table import SamplingTable
from faser_trtllm.scheduler.scheduler import Scheduler
from faser_trtllm.scheduler.update import cut_output

log = logging.getLogger(__name__)

Sink = Callable[[RequestOutput], bool | OutputEnd]
"""Gets the new tokens of a request on the executor's thread, at most once per step. If it returns True, or the counts
up to the end of the output, the request ends with FinishReason.STOP (a stop word was found) without further calls."""


class Executor(Closing):
    """Owns the requests in flight. Build it with executor.factory.open_executor."""

    def __init__(
        self,
        scheduler: Scheduler,
        draft_worker: DraftWorker,
        verifier: Verifier,
        sampling: SamplingTable,
        clock: Clock,
        admission: Admission,
        *,
        max_queue_size: int,
        resources: ExitStack | None = None,
        drafters: Sequence[Drafter] = (),
        gauges: Callable[[], Mapping[str, float]] = dict,
        prepare_draft: Callable[[Path], Callable[[], None]] | None = None,
    ) -> None:
        """drafters: the drafters of draft_worker, notified when a request leaves. gauges: for stats(). prepare_draft:
        see OpenedEngines."""
        self.vocab_size = admission.vocab_size
        self.max_seq_len = admission.max_seq_len
        self.max_draft_len = admission.max_draft_len
        self.tokens_per_block = verifier.tokens_per_block
        self._scheduler = scheduler
        self._draft_worker = draft_worker
        self._verifier = verifier
        self._sampling = sampling
        self._clock = clock
        self._admission = admission
        self._max_queue_size = max_queue_size
        self._resources = resources or ExitStack()
        self._drafters = tuple(drafters)
        self._stats = ExecutorStats(admission.max_draft_len)
        self._gauges = gauges
        self._prepare_draft = prepare_draft
        self._watchers: list[StepWatcher] = [self._stats]
        self._before_pass: Callable[[], None] = lambda: None
        self._sinks: dict[str, Sink] = {}
        self._slots: dict[str, int] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._live: dict[str, str] = {}  # the client of each request that has not ended, by id; guarded by _wake
        self._num_of_client: Counter[str] = Counter()  # requests in _live by client
        self._draining = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._num_steps = 0
        self._slow_steps = SlowSteps()
        self._moved_s = 0.0  # time.monotonic() when a step last began or ended, or work arrived at an idle executor

    def step(self) -> bool:
        """Run one pass over everything in flight; return False if there is nothing to do."""
        self._read_inbox()
        if not self._scheduler.has_work():
            self._rest()
            return False
        begun_s = self._clock.now_s()
        plan = self._scheduler.schedule()
        self._bind(plan)
        self._before_pass()
        scheduled_s = self._clock.now_s()
        drafting = self._draft_worker.draft(plan)
        result = self._verifier.verify(plan, drafting)
        verified_s, drafts = self._clock.now_s(), drafting.result()
        if self._sampling.guided.slots:
            self._scheduler.note_guides(plan, self._sampling.guided.take_costs())
        outputs = self._scheduler.update(plan, drafts, result)
        places = self._deliver(plan, outputs)
        if places:
            result = result.up_to(places, plan.scheduled.num_pending + drafts.num_new_drafts)
        record = StepRecord.of(plan, drafts, result, (begun_s, scheduled_s, verified_s, self._clock.now_s()))
        self._scheduler.observe(record)
        for watcher in self._watchers:
            watcher.step(record)
        if not self._scheduler.has_work():
            self._rest()
        return True

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        priority: float = 0.5,
        timeout_s: float | None = None,
        arrived_s: float | None = None,
    ) -> None:
        """Queue a request; raises InvalidArgumentError or UnavailableError, and then the sink is never called.

        arrived_s: when the request arrived, on the executor's clock, which timeout_s counts from; None: now.
        """
        arrival_s, key = self._clock.now_s() if arrived_s is None else arrived_s, params.client_key
        request = self._admission.request(
            request_id,
            prompt_token_ids,
            params,
            arrival_s=arrival_s,
            priority=priority,
            deadline_s=None if timeout_s is None else arrival_s + timeout_s,
        )
        self._scheduler.check(request)
        with self._wake:
            if self._closing or self._draining:
                raise UnavailableError("the server is shutting down; send the request to another one")
            if len(self._live) >= self._max_queue_size:
                raise UnavailableError(
                    f"Maximum queue size of {self._max_queue_size} has been reached, please try again later "
                    "(max_queue_size)"
                )
            held = self._num_of_client[key] if key else 0
            if held and held >= self._max_queue_size - len(self._live):
                raise UnavailableError(
                    f"the client has {held} unfinished requests, but may have only half of what others leave of "
                    f"max_queue_size ({self._max_queue_size}); try again when some of them have ended"
                )
            if request_id in self._live:
                raise InvalidArgumentError(f"request id {request_id[:64]!r} is already in use by a running request")
            if not self._live:
                self._moved_s = time.monotonic()
            self._live[request_id] = key
            self._num_of_client[key] += 1
            self._inbox.append(lambda: self._add(request, sink))
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """End a request with FinishReason.CANCELLED; unknown or finished ids are ignored."""
        with self._wake:
            if request_id in self._live:
                self._inbox.append(lambda: self._cancel(request_id))
                self._wake.notify()

    def replace_draft(self, engine_dir: Path) -> Future[None]:
        """Replace the draft model or head by that of another directory, or of this one if it was built again.

        The calling thread opens it and raises ConfigError or EngineFileError if it cannot be used, UnavailableError if
        the executor is closing. It takes effect between two steps; then the result is set. Running requests continue:
        their pending drafts are verified with the distributions that they were drawn from. The new draft model runs
        each request's tokens before it drafts for it.
        """
        if self._prepare_draft is None:
            raise ConfigError("these engines' draft cannot be replaced while they run; start the server again")
        self._check_open()
        put, done = self._prepare_draft(engine_dir), Future[None]()

        def replace() -> None:
            try:
                put()
                self._scheduler.forget_draft_kv()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._wake:
            self._check_open()
            self._inbox.append(replace)
            self._wake.notify()
        return done

    def start(self) -> None:
        """Run step() on a new thread until close()."""
        self._thread = threading.Thread(target=self._run, name="faser-executor", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; return True if all ended within timeout_s."""
        deadline_s = time.monotonic() + timeout_s
        with self._wake:
            self._draining = True
            while self._live:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._wake.wait(min(left_s, 0.05))
        return True

    def stats(self) -> dict[str, float]:
        """Return counters since the start, and gauges of the queue, the cache and the speculation guard."""
        sources = {}
        for drafter in self._drafters:
            tested, passed = self._sampling.tests(drafter.spec.source)
            sources[f"num_tested_drafts_{drafter.spec.name}"] = float(tested)
            sources[f"num_passed_drafts_{drafter.spec.name}"] = float(passed)
        return self._stats.as_dict() | self._scheduler.gauges() | dict(self._gauges()) | sources

    def progress(self) -> Progress:
        """Return whether the executor's thread makes progress. Thread-safe, even while that thread hangs."""
        age_s = time.monotonic() - self._moved_s
        return Progress(self._num_steps, bool(self._live), age_s, self._slow_steps.slow_s)

    def watch(self, watcher: StepWatcher) -> None:
        """Notify the watcher of every step and every ended request from now on; call it before start()."""
        self._watchers.append(watcher)

    def before_pass(self, call: Callable[[], None]) -> None:
        """Set a function that is called after the sinks: just before the next step's passes, during which this thread
        does not need the GIL, or at once if there is no next step. Set it before start()."""
        self._before_pass = call

    def watch_cache(self, listener: BlockListener) -> bool:
        """See Scheduler.watch_cache; call it before start(). The listener is called on the executor's thread."""
        return self._scheduler.watch_cache(listener)

    def check_integrity(self) -> None:
        """Check slots, blocks and bindings between two steps; raise AssertionError if they are inconsistent."""
        self._scheduler.check_integrity()
        running = {r.request_id: r.slot for r in self._scheduler.running}
        assert self._slots == running, "the sampling table has entries of requests that do not run"
        bound = {slot for slot in range(len(self._sampling.array)) if self._sampling.is_bound(slot)}
        assert bound == set(running.values()), "a running request has no entry in the sampling table"

    def close(self) -> None:
        """Stop the thread, cancel all requests, and free the engines."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._read_inbox()
        for request_id in list(self._sinks):
            self._cancel(request_id)
        self._before_pass()
        self._resources.close()

    def _check_open(self) -> None:
        """Raise UnavailableError if the executor is closing, after which nothing reads the inbox."""
        if self._closing:
            raise UnavailableError("the server is shutting down; start it again with the new draft")

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._inbox and not self._scheduler.has_work() and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
            started_s = self._moved_s = time.monotonic()
            self.step()
            self._num_steps += 1
            self._moved_s = time.monotonic()
            self._slow_steps.observe(self._moved_s - started_s)

    def _rest(self) -> None:
        """Hand over what is left, and forget the last step's requests: there is no next step."""
        self._stats.rest()
        self._before_pass()

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _add(self, request: Request, sink: Sink) -> None:
        self._sinks[request.request_id] = sink
        self._scheduler.add(request)

    def _cancel(self, request_id: str) -> None:
        request = self._scheduler.cancel(request_id)
        if request is not None:
            self._send(RequestOutput(request, (), FinishReason.CANCELLED))

    def _bind(self, plan: SchedulerOutput) -> None:
        """Update the sampling table: release preempted and timed-out requests, then bind the admitted ones, to which
        their slots may have been given."""
        for request in plan.paused:
            if request.num_drafts:
                self._sampling.park(self._slots[request.request_id], request)
            self._release(request)
        for request in plan.finished:
            self._release(request)
        for request in plan.admitted:
            self._slots[request.request_id] = request.slot
            self._sampling.bind(request.slot, request)

    def _release(self, request: Request) -> None:
        slot = self._slots.pop(request.request_id, None)
        if slot is not None:
            self._sampling.release(slot)
            for drafter in self._drafters:
                drafter.end(slot)
        elif request.is_finished:
            self._sampling.forget(request)

    def _deliver(self, plan: SchedulerOutput, outputs: list[RequestOutput]) -> dict[int, int]:
        """Send outputs; return, by index of each request that ends, how many tokens its output has (see up_to)."""
        for request in plan.finished:
            self._send(RequestOutput(request, (), request.finish_reason))
        places, rows = {}, plan.scheduled
        for output in outputs:
            place = self._send(output)
            if place is not None and (index := rows.requests.index(output.request)) < rows.num_sampled:
                places[index] = place
        return places

    def _send(self, output: RequestOutput) -> int | None:
        """Send an output; return how many of the pass's tokens count if it ended early, by an end id or by its sink."""
        request = output.request
        place = len(output.new_token_ids) + 1 if output.finish_reason is FinishReason.STOP else None
        sink = self._sinks.get(request.request_id)
        if sink is None:
            return place
        try:
            stop = sink(output)
        except Exception:
            log.exception("the output sink of a request failed; the request is cancelled")
            stop = True
        if output.finish_reason is None and stop:
            self._scheduler.finish(request, FinishReason.STOP)
        if isinstance(stop, OutputEnd):
            place = max(0, len(output.new_token_ids) - (request.num_output_tokens - stop.num_output_tokens))
            cut_output(request, stop)
        if output.finish_reason is not None or stop:
            del self._sinks[request.request_id]
            self._release(request)
            for watcher in self._watchers:
                watcher.finished(request)
            with self._wake:
                key = self._live.pop(request.request_id)
                self._num_of_client[key] -= 1
                if not self._num_of_client[key]:
                    del self._num_of_client[key]
                self._wake.notify_all()
        return place
