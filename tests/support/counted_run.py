"""Requests run to their end, with everything counted that the executor's statistics claim."""

import random

from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.stats import StepWatcher
from tests.support.executor_harness import Collector


class Watcher(StepWatcher):
    """Counts the tokens of decoding requests one by one."""

    def __init__(self):
        self.num_decoded = 0
        self.ended = []

    def finished(self, request):
        self.ended.append(request)

    def step(self, record):
        decoding = set(map(id, record.plan.view.decoding))
        for request, num_tokens in zip(record.plan.scheduled.requests, record.result.num_tokens, strict=False):
            self.num_decoded += int(num_tokens) if id(request) in decoding else 0


class Run:
    """All requests to their end, a step every 3 ms of a manual clock; tokens are counted by their sinks too."""

    def __init__(self, setup, requests, cancel=()):
        self.executor, self.collector, self.watcher = setup.open(), Collector(), Watcher()
        self.executor.watch(self.watcher)
        self.token_times: dict[str, list[float]] = {}
        for i, (prompt, params) in enumerate(requests):
            self.executor.submit(str(i), prompt, params, self._sink(str(i), setup.clock))
        num_steps = 0
        while self.executor.step():
            setup.clock.advance(0.003)
            num_steps += 1
            if num_steps == 3:
                for name in cancel:
                    self.executor.cancel(name)
        self.num_steps = num_steps
        self.stats = self.executor.stats()
        self.requests = list(self.collector.requests.values())
        self.executor.close()

    def _sink(self, name, clock):
        inner = self.collector.sink(name)

        def sink(output):
            if output.new_token_ids:
                self.token_times.setdefault(name, []).append(clock.now_s())
            return inner(output)

        return sink

    def series(self, name):
        found = []
        while f"{name}[{len(found)}]" in self.stats:
            found.append(self.stats[f"{name}[{len(found)}]"])
        return found

    def total(self, field):
        return sum(getattr(request.stats, field) for request in self.requests)


def some_requests(seed, number=12):
    draw = random.Random(seed)
    return [
        (
            [draw.randrange(1, 5) for _ in range(draw.randint(1, 12))],
            SamplingParams(max_tokens=draw.randint(1, 30), seed=i, temperature=1.0),
        )
        for i in range(number)
    ]
