"""Runs the real scheduler, cache, drafter, verifier and rejection sampling over toy engines."""

from __future__ import annotations

import functools
import random
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np

from faser_trtllm.config import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    DrafterName,
    ExecutorConfig,
    KvCacheConfig,
    SchedulerConfig,
    SchedulerKind,
)
from faser_trtllm.core.cost_table import CostSample, CostTable, ExitModel, Fingerprint, Interference, Routing
from faser_trtllm.core.decision import PruneRule
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.opening import stay
from faser_trtllm.executor.factory import assemble
from faser_trtllm.ops.arrays import int32_at
from faser_trtllm.ops.best_slots import SlotCosts, VerificationRule
from faser_trtllm.ops.requests.pick_branches import prior_acceptance
from faser_trtllm.policy.base import Decision, Mode
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.policy.static import FixedPolicy, OffPolicy
from lab.clock import ManualClock
from lab.faults import parse_faults, with_faults
from tests.support.doubtful import doubtful_drafts
from tests.support.toy_engine import ToyBlock, ToyEngine, ToyHead, ToyMedusa, blend, foreign, make_table

STEP_S = 0.001


ROUTING = Routing(8, ToyEngine.TOP_K, 0.4)


def toy_costs(routing: Routing | None = None) -> CostTable:
    """A staircase of 4 rows, a draft at a tenth of the target, two lanes, and an exit model that says it pays. routing:
    of a target whose experts take as long as two rows each."""

    def sample(kind: str, rows: int, scale: float, partition: str) -> CostSample:
        is_target = kind.startswith(("verify", "segment"))
        experts = float(routing.distinct_of(rows, min(rows, 8))) if routing and is_target else 0.0
        ms = scale * (1.0 + 0.5 * ((rows - 1) // 4) + 0.25 * experts)
        return CostSample(kind, rows, min(rows, 8), 16, ms, partition, experts)

    samples = [
        sample(kind, rows, scale, partition)
        for kind, scale, partition in (
            ("verify", 1.0, "all"),
            ("draft_step", 0.1, "all"),
            ("draft_rows", 0.1, "all"),
            ("verify", 1.2, "verify"),
            ("draft_step", 0.12, "draft"),
            ("draft_rows", 0.12, "draft"),
            ("segment:0", 0.5, "all"),
            ("segment:1", 0.5, "all"),
        )
        for rows in (1, 2, 4, 5, 8, 9, 12, 16, 17, 32, 64)
    ]
    return CostTable.fit(
        samples,
        Fingerprint("toy", "toy", 2, "toy"),
        interference=(Interference("draft", "verify", 1.0, 1.0),),
        exits=(ExitModel(1, -1.5, -0.5, 1.0, 0.5, pays=True),),
        routing=routing,
    )


class ErraticPolicy:
    """Drafts and trims at random, and also by later drafts, which the exactness rule allows: they stay pending."""

    name = "erratic"

    def __init__(self, max_draft_len: int, seed: int, modes=tuple(Mode)) -> None:
        self._random = random.Random(seed)
        self._modes = modes
        self.boundaries = ()
        self.num_accepted = 0
        self.stats = []
        self._max_draft_len = max_draft_len

    def plan(self, view):
        lengths = [self._random.randint(0, self._max_draft_len) for _ in view.decoding]
        num_held = self._random.choice((0, 0, 2))
        mode = self._random.choice(self._modes)
        self.boundaries = (1,) if self._random.random() < 0.7 else ()
        return Decision(lengths, verification=self, exits=self, tested=self, mode=mode, num_held=num_held)

    def lengths(self, sampling, slots, num_tokens, num_pending):
        lengths = []
        for slot, first, pending in zip(*(c.tolist() for c in (slots, num_tokens, num_pending)), strict=True):
            drafts = int32_at(int(sampling[slot]["tokens"]), first + pending)[first:].tolist()
            length = self._random.randint(0, pending)
            if drafts and drafts[-1] == 0:  # by the last of the drafts, which none of the rows may test yet
                length = 0
            lengths.append(length)
        return lengths

    def rule(self, sampling, slots, num_tokens, num_drafts, boundary):
        """Up to the first draft that is not the best candidate, or anything shorter or longer now and then."""
        if self._random.random() < 0.8:
            return PruneRule(np.full(sum(num_drafts), 9.0, np.float32), rank=-99.0, survival=1.0, least=0.5)
        drawn = [self._random.choice((9.0, 9.0, -9.0)) for _ in range(sum(num_drafts))]
        return PruneRule(np.array(drawn, np.float32), survival=1.0, least=0.5)

    def add(self, sampling, slots, num_tokens, num_accepted, outcome):
        self.num_accepted += int(num_accepted.sum())

    def observe(self, stats):
        self.stats.append(stats)


class FreeRowsPolicy(FixedPolicy):
    """One length for all, of whose rows none costs anything: branches come on top, as many as there may be."""

    def __init__(self, num_draft_tokens, max_draft_len):
        super().__init__(num_draft_tokens)
        costs = SlotCosts(np.ones(2), price=1.0)
        self._rule = VerificationRule(prior_acceptance(max_draft_len), costs)

    def plan(self, view):
        return replace(super().plan(view), verification=self._rule)


@dataclass
class Setup:
    """One way of running requests; the default is the plainest one."""

    vocab_size: int = 5
    table_seed: int = 0
    noise: float = 1.0
    policy: str = "off"  # off, fixed:K, fixed:K:mode, free:K, erratic (all modes, at random)
    max_draft_len: int = 4
    max_batch_size: int = 8
    max_num_tokens: int = 64
    max_logit_rows: int | None = None
    max_seq_len: int = 64
    tokens_per_block: int = 4
    num_blocks: int = 128
    capacity: str = "GUARANTEED_NO_EVICT"
    reuse: bool = True
    chunk_unit_size: int = 2
    chunked: bool = True
    chunking: str = "FIRST_COME_FIRST_SERVED"
    scheduler: str = "native"
    segmented: bool = True
    policy_seed: int = 0
    tables: tuple = field(default=None)
    faults: str = ""  # as FASER_FAULT has them; then the guard of a service is there too
    draft_timeout_ms: float = 1e9
    max_queue_size: int = 100_000
    # "foreign": a draft model that lacks a token; "head": an EAGLE-3 head or an MTP layer; "medusa": Medusa heads;
    # "block": a block drafter
    drafters: str = "model"
    num_branches: int = 0
    draft_window: int | None = None
    is_mixture: bool = False  # the target has experts
    doubtful: bool = True  # as support/doubtful.py has it
    wrap_drafter: object = staticmethod(lambda drafter: drafter)
    make_clock: type = ManualClock

    def open(self, trace=None):
        target, draft = self.tables or self.make_tables()
        sizes = {
            "num_blocks": self.num_blocks,
            "tokens_per_block": self.tokens_per_block,
            "max_batch_size": self.max_batch_size,
            "max_num_tokens": self.max_num_tokens,
            "max_seq_len": self.max_seq_len,
        }
        config = ExecutorConfig(
            scheduler=SchedulerKind(self.scheduler),
            kv_cache_config=KvCacheConfig(enable_block_reuse=self.reuse),
            scheduler_config=SchedulerConfig(
                capacity_scheduler_policy=CapacitySchedulerPolicy(self.capacity),
                enable_chunked_context=self.chunked,
                chunk_unit_size=self.chunk_unit_size,
                context_chunking_policy=ContextChunkingPolicy(self.chunking),
            ),
            max_queue_size=self.max_queue_size,
            drafters=self.drafter_names(),
            num_branches=self.num_branches,
        )
        self.clock = self.make_clock()
        max_num_branches = self.max_batch_size * self.num_branches
        self.target = ToyEngine(
            target,
            **sizes,
            segmented=self.segmented,
            max_num_branches=max_num_branches,
            max_logit_rows=self.max_logit_rows,
            num_experts=ROUTING.num_experts if self.is_mixture else 0,
        )
        self.draft = None
        if self.policy != "off" and "head" in self.drafters:
            self.draft = ToyHead(draft, self.target, **sizes)
        elif self.policy != "off" and "medusa" in self.drafters:
            self.draft = ToyMedusa(draft, self.target, **sizes)
        elif self.policy != "off" and "block" in self.drafters:
            self.draft = ToyBlock(draft, self.target, **sizes)
        elif self.policy != "off" and "model" in self.drafters:
            self.draft = ToyEngine(draft, **sizes, longest=self.draft_window)
        elif self.policy != "off" and "foreign" in self.drafters:
            self.draft = ToyEngine(foreign(draft), **sizes, longest=self.draft_window)
        faults = parse_faults(self.faults)
        with doubtful_drafts() if self.doubtful else nullcontext():
            return assemble(
                with_faults(self.target, "target", faults),
                None if self.draft is None else with_faults(self.draft, "draft", faults),
                self.make_policy(),
                config,
                draft_timeout_ms=self.draft_timeout_ms if self.faults else None,
                max_seq_len=self.max_seq_len,
                max_draft_len=0 if self.policy == "off" else self.max_draft_len,
                clock=self.clock,
                enter_mode=stay,
                trace=trace,
                wrap_drafter=self.wrap_drafter,
                copy_kv=self.target.copy_kv,
                draft_window=self.draft_window,
            )

    def drafter_names(self):
        names = self.drafters.split(",")
        return [DrafterName("suffix" if name == "suffix" else "model") for name in names]

    def make_tables(self):
        """The target's and the draft's, which setups share; nobody writes to them."""
        return _tables(self.vocab_size, self.table_seed, self.noise)

    def make_policy(self):
        if self.policy == "off":
            return OffPolicy()
        if self.policy == "erratic":
            return ErraticPolicy(self.max_draft_len, self.policy_seed)
        if self.policy.startswith("free"):
            return FreeRowsPolicy(int(self.policy.removeprefix("free:")), self.max_draft_len)
        if not self.policy.startswith("fixed"):
            costs = toy_costs(ROUTING if self.is_mixture else None)
            return make_policy(self.policy, self.max_draft_len, costs, self.max_batch_size, self.drafter_names())
        _, length, *mode = self.policy.split(":")
        return FixedPolicy(int(length), Mode(mode[0]) if mode else Mode.SERIAL)


@functools.lru_cache(8)
def _tables(vocab_size, seed, noise):
    target = make_table(vocab_size, seed)
    draft = blend(target, seed + 1, noise)
    for table in (target, draft):
        table.setflags(write=False)
    return target, draft


class Collector:
    """Sinks by request id -> tokens and finish reason."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.requests: dict[str, object] = {}

    def sink(self, request_id: str):
        self.tokens[request_id] = []

        def collect(output):
            assert request_id not in self.reasons, "output after the end"
            self.tokens[request_id] += output.new_token_ids
            self.requests[request_id] = output.request
            if output.finish_reason is not None:
                self.reasons[request_id] = output.finish_reason.value
            return False

        return collect


def run(
    setup: Setup,
    prompts: list[tuple[list[int], SamplingParams]],
    arrivals: list[int] | None = None,
    cuts: list[tuple[str, int] | None] | None = None,
    num_clients: int = 3,
) -> Collector:
    """Run all requests to their end; arrivals[i] is the step before which request i is submitted.

    cuts[i] is how and after how many steps request i ends early: by its deadline ("timeout") or by "cancel". Clients
    send them in turn, and pause each other's.
    """
    executor, collector = setup.open(), Collector()
    cut = dict(enumerate(cuts or []))
    cancels: dict[int, list[str]] = {}
    waiting = sorted(enumerate(prompts), key=lambda item: arrivals[item[0]] if arrivals else 0)
    step = 0
    with executor:
        while True:
            while waiting and (not arrivals or arrivals[waiting[0][0]] <= step):
                index, (prompt, params) = waiting.pop(0)
                kind, num_steps = cut.get(index) or ("", 0)
                # half a step, since the clock's sums are rounded
                timeout_s = STEP_S * (num_steps + 0.5) if kind == "timeout" else None
                params = replace(params, client_key=str(index % num_clients))
                executor.submit(str(index), prompt, params, collector.sink(str(index)), timeout_s=timeout_s)
                if kind == "cancel":
                    cancels.setdefault(step + num_steps, []).append(str(index))
            for request_id in cancels.pop(step, ()):
                executor.cancel(request_id)
            busy = executor.step()
            step += 1
            setup.clock.advance(STEP_S)
            executor.check_integrity()
            assert step < 20_000, "the executor does not come to an end"
            if not busy and not waiting:
                break
        stats = executor.stats()
        assert stats["num_running"] == stats["num_waiting"] == 0
    return collector
