"""Requests of random shapes, again and again, and the memory that the device has given out in between."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.decision import Decision
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.policy.base import StepView
from tests.support.executor_harness import Collector, ErraticPolicy
from tests.virtual_gpu.device import frees
from tests.virtual_gpu.device.counters import Counters
from tests.virtual_gpu.device.library import driver
from tests.virtual_gpu.device.streams import call

Bytes = tuple[int, int]
"""In use: of the device, of page-locked memory."""

# The largest of everything: what grows on demand has grown after it.
_LARGEST = {
    "repetition_penalty": 1.2,
    "bad_words": ((5, 6), (7,)),
    "logit_bias": ((8, 1.5), (9, -2.0)),
    "min_tokens": 3,
}


def soak(path: Path, num_rounds: int, seed: int, leak: Callable[[Executor], Any] | None = None) -> list[Bytes]:
    """Memory before the engines are opened, after the largest round, after each random one, and after closing.

    leak: called after each round; for a test of the test.
    """
    driver().seed(seed)
    chance = random.Random(seed)
    built = EngineDir.load(path).build_config
    found = [in_use()]
    config = ExecutorConfig(speculation="fixed:1")  # opens the draft; the policy is ours
    policy = _LargestFirst(built.max_draft_len, seed)
    with open_executor(path, config, wrap_policy=lambda _: policy) as executor:
        longest = built.max_seq_len - 12
        for number in range(2):
            _run(executor, [([1 + i] * longest, _LARGEST | {"max_tokens": 8}) for i in range(6)], f"largest {number}")
        found.append(in_use())
        policy.is_erratic = True
        kept = []
        for number in range(num_rounds):
            _run(executor, [_random_request(chance, longest) for _ in range(chance.randint(1, 6))], str(number), chance)
            kept.append(leak and leak(executor))
            found.append(in_use())
        executor.check_integrity()
        del kept
    del executor
    found.append(in_use())
    return found


class _LargestFirst(ErraticPolicy):
    """All drafts of all requests, until it becomes erratic."""

    is_erratic = False

    def plan(self, view: StepView) -> Decision:
        return super().plan(view) if self.is_erratic else Decision([self._max_draft_len] * len(view.decoding))


def _random_request(chance: random.Random, longest: int) -> tuple[list[int], dict[str, Any]]:
    prompt = [chance.randrange(2, 250) for _ in range(chance.choice((1, 5, chance.randint(1, longest))))]
    fields: dict[str, Any] = {"max_tokens": chance.randint(3, 8)}
    if chance.random() < 0.5:
        fields |= {"temperature": 0.8, "seed": chance.choice((None, 7))}
    if chance.random() < 0.3:
        fields |= _LARGEST
    return prompt, fields


def _run(executor: Executor, requests: list[Any], name: str, chance: random.Random | None = None) -> None:
    """chance: some are cancelled on the way."""
    collector = Collector()
    for index, (prompt, fields) in enumerate(requests):
        request_id = f"{name} {index}"
        params = SamplingParams(**{"temperature": 0.0, "end_ids": (), **fields})
        executor.submit(request_id, prompt, params, collector.sink(request_id))
    while executor.step():
        if chance is not None and chance.random() < 0.05:
            executor.cancel(chance.choice(list(collector.tokens)))


def in_use() -> Bytes:
    """Now, with what nobody holds freed."""
    for _ in range(2):  # what is freed by work that ran is freed by work that follows
        gc.collect()
        frees.retry()
        call("cuCtxSynchronize")
    counters = Counters.now()
    return counters.device_bytes, counters.host_bytes
