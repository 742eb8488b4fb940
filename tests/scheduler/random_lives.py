"""Random lives of many requests: arrivals, drafts, passes, cancellations, with every invariant checked at each step."""

import random
import zlib
from collections import Counter

import numpy as np

from faser_trtllm import native
from faser_trtllm.config import CapacitySchedulerPolicy
from faser_trtllm.core.plan import DraftResult, Ended, StepRecord, VerifyResult
from faser_trtllm.core.request import FinishReason, Request, RequestState
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.kvcache.manager import KVCacheManager
from faser_trtllm.policy.base import Decision, Mode
from faser_trtllm.scheduler.scheduler import Scheduler, SchedulerLimits
from lab.clock import ManualClock
from tests.support.columns import columns

MAX_SEQ_LEN = 40
MAX_DRAFT_LEN = 5
VOCAB_SIZE = 3
END_ID = VOCAB_SIZE


def digest(tokens, end):
    """Stands for the KV of position end - 1, which depends on all tokens up to it."""
    return zlib.crc32(tokens[:end].tobytes())


def next_token(tokens, end):
    """The toy target model: greedy, a function of the whole prefix, now and then the end id."""
    value = digest(tokens, end)
    return END_ID if value % 29 == 0 else value % VOCAB_SIZE


def expected_output(request):
    """Return what the target alone generates, one token at a time, and why it stops."""
    tokens = request.tokens.copy()
    end = request.prompt_len
    while end < request.max_num_tokens:
        token = next_token(tokens, end)
        if token in request.params.end_ids:
            return tokens[request.prompt_len : end].tolist(), FinishReason.STOP
        tokens[end] = token
        end += 1
    return tokens[request.prompt_len : end].tolist(), FinishReason.LENGTH


class RandomPolicy:
    """Any lengths of drafts and of their verification, also ones that callers clamp, in any mode, for some steps."""

    name = "random"

    def __init__(self, rng):
        self._rng = rng
        self._holding = random.Random(0)  # of its own, so that found lives stay what they are where nothing is held

    def plan(self, view):
        lengths = [self._rng.randint(0, MAX_DRAFT_LEN + 1) for _ in view.decoding]
        return Decision(lengths, mode=self._rng.choice(tuple(Mode)), num_held=self._holding.choice((0, 0, 1, 5)))

    def verification_length(self, pending):
        return self._rng.choice((0, pending, self._rng.randint(0, pending)))

    def observe(self, stats):
        assert stats.num_steps > 0
        assert stats.num_rows == stats.num_requests + stats.num_verified
        assert stats.num_accepted <= stats.num_tokens <= stats.num_accepted + stats.num_requests


class ToyPair:
    """Target and draft with KV memory that remembers the prefix each token was computed from."""

    def __init__(self, kv, rng, policy):
        self._kv, self._rng, self._policy = kv, rng, policy
        self.target = np.full((kv.num_blocks, kv.tokens_per_block), -1, np.int64)
        self.draft = np.full((kv.num_blocks, kv.tokens_per_block), -1, np.int64)

    def _run(self, memory, request, first, end):
        """Rows first .. end - 1: each sees all positions before it, so these must hold this request's prefix."""
        size, row = self._kv.tokens_per_block, self._kv.block_table[request.slot]
        for position in range(first):
            found = memory[row[position // size], position % size]
            assert found == digest(request.tokens, position + 1), f"{request}: wrong KV at position {position}"
        for position in range(first, end):
            memory[row[position // size], position % size] = digest(request.tokens, position + 1)

    def draft_tokens(self, plan):
        num_new, num_computed = [], []
        for item in plan.scheduled:
            request, new = item.request, 0
            computed = request.num_draft_computed_tokens
            room = item.num_drafts - request.num_drafts
            # Who decodes and wants no more drafts has no rows: its pending drafts may lack blocks.
            if request.max_draft_len and (room > 0 or not request.is_decoding) and self._rng.random() < 0.8:
                if request.is_decoding:
                    known = request.num_tokens + request.num_drafts
                    new = self._rng.randint(0, room)
                else:
                    known = request.num_computed_tokens + item.num_new_tokens
                for position in range(known, known + new):
                    right = next_token(request.tokens, position)
                    wrong = self._rng.random() < 0.3
                    request.tokens[position] = (right + 1) % (VOCAB_SIZE + 1) if wrong else right
                end = known + max(0, new - 1)  # the newest draft is not run
                if end > computed:
                    self._run(self.draft, request, computed, end)
                    computed = end
            num_new.append(new)
            num_computed.append(computed)
        return DraftResult(*columns(num_new, num_computed))

    def verify(self, plan, drafts, fault):
        """Rejection sampling, greedy. fault: "failed" or "exhausted", for the first request that reaches its end."""
        rows, ended = plan.scheduled, {}
        ids, num_verified = np.full((rows.num_sampled, MAX_DRAFT_LEN + 2), -7, np.int32), [0] * len(rows)
        num_tokens, num_accepted, outcome = np.zeros((3, rows.num_sampled), np.int32)
        for i, item in enumerate(rows):
            request, end = item.request, item.request.num_computed_tokens + item.num_new_tokens
            if not item.num_new_tokens:
                assert i >= rows.num_running
                continue
            pending = request.num_drafts + int(drafts.num_new_drafts[i])
            limit = self._policy.verification_length(pending) if request.is_decoding else 0
            live = num_verified[i] = min(limit, item.max_verified)
            self._run(self.target, request, request.num_computed_tokens, end + live)
            assert (end == request.num_tokens) == (i < rows.num_sampled)
            if end < request.num_tokens:
                continue
            outcome[i] = native.BONUS
            for row in range(live + 1):
                if fault:
                    ended[i] = Ended(FinishReason.ERROR, "broken") if fault == "failed" else Ended(FinishReason.LENGTH)
                    fault = None
                    break
                token = next_token(request.tokens, end + row)
                ids[i, row] = token
                num_tokens[i] = row + 1
                if row == pending or request.tokens[end + row] != token:
                    break
                num_accepted[i] = row + 1
            else:
                outcome[i] = native.STILL_PENDING
        return VerifyResult(ids, num_tokens, num_accepted, outcome, *columns(num_verified), ended=ended)


class Life:
    """Adds, cancels, stops, deadlines, faults and steps in random order, in a cache that is usually too small."""

    def __init__(self, seed, *, tokens_per_block, spare_blocks, max_batch_size, spare_rows, reuse=True, **limits):
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        blocks_per_seq = -(-MAX_SEQ_LEN // tokens_per_block)
        self.kv = KVCacheManager(
            blocks_per_seq + spare_blocks, tokens_per_block, max_batch_size, blocks_per_seq, enable_block_reuse=reuse
        )
        self.limits = SchedulerLimits(
            max_batch_size=max_batch_size,
            max_num_tokens=max_batch_size + spare_rows,
            max_seq_len=MAX_SEQ_LEN,
            max_draft_len=MAX_DRAFT_LEN,
            **limits,
        )
        policy = RandomPolicy(self.rng)
        self.scheduler = Scheduler(self.kv, self.limits, policy, self.clock)
        self.pair = ToyPair(self.kv, self.rng, policy)
        self.prompts = [[self.rng.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(2)]
        self.live, self.streamed = {}, {}
        self.seen = Counter()

    def run(self, num_steps):
        """Random steps, then steps until all have ended; nothing may be left."""
        for _ in range(num_steps):
            if not self.live or self.rng.random() < 0.1:  # bursts, so that the queue is empty at times
                for _ in range(self.rng.randint(1, 2 * self.limits.max_batch_size)):
                    self.add()
            if self.live and self.rng.random() < 0.03:
                self.end_early()
            self.clock.advance(1.0)
            self.step(self.rng.choice(("failed", "exhausted")) if self.rng.random() < 0.04 else None)
        for _ in range(100 * self.limits.max_batch_size * MAX_SEQ_LEN):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.live, "a request never ended"
        assert self.kv.num_free_blocks == self.kv.num_blocks
        return self.seen

    def add(self):
        rng = self.rng
        prompt = rng.choice(self.prompts)[: rng.randint(1, 24)]
        params = SamplingParams(
            max_tokens=rng.randint(1, 24),
            end_ids=(END_ID,) if rng.random() < 0.5 else (),
            num_draft_tokens=0 if rng.random() < 0.25 else None,
            client_key="ab"[self.seen["added"] % 2],
        )
        request = Request(
            str(self.seen["added"]),
            prompt,
            params,
            max_seq_len=MAX_SEQ_LEN,
            max_draft_len=MAX_DRAFT_LEN,
            priority=rng.choice((0.5, 0.5, 0.9)),
            deadline_s=self.clock.now_s() + rng.randint(10, 80) if rng.random() < 0.1 else None,
        )
        try:
            self.scheduler.check(request)
        except InvalidArgumentError:
            assert not self.limits.enable_chunked_context
            assert request.prompt_len > self.limits.max_num_tokens
            return
        self.seen["added"] += 1
        self.scheduler.add(request)
        self.live[request.request_id] = request
        self.streamed[request.request_id] = []

    def end_early(self):
        request = self.live.pop(self.rng.choice(sorted(self.live)))
        if self.rng.random() < 0.5:
            assert self.scheduler.cancel(request.request_id) is request
            assert request.finish_reason is FinishReason.CANCELLED
        else:
            self.scheduler.finish(request, FinishReason.STOP)
        assert self.scheduler.cancel(request.request_id) is None

    def step(self, fault=None):
        plan = self.scheduler.schedule()
        for request in plan.finished:
            assert request.finish_reason is FinishReason.TIMEOUT
            assert self.clock.now_s() >= request.deadline_s
            del self.live[request.request_id]
        self.check_plan(plan)
        drafts = self.pair.draft_tokens(plan)
        result = self.pair.verify(plan, drafts, fault)
        broken = {plan.scheduled.requests[index].request_id for index in result.ended}
        outputs = self.scheduler.update(plan, drafts, result)
        record = StepRecord.of(plan, drafts, result, (self.clock.now_s(),) * 4)
        self.scheduler.observe(record)
        for output in outputs:
            self.check_output(output, output.request.request_id in broken)
        self.scheduler.check_integrity()
        for request in self.scheduler.running:
            known = request.num_tokens + request.num_drafts
            assert request.num_computed_tokens < request.num_tokens
            assert request.num_draft_computed_tokens <= known < request.max_num_tokens
            if request.is_decoding:
                held = self.kv.num_held_blocks(request.slot)
                assert held <= self.kv.num_blocks_for(known), "blocks of dropped drafts are still held"
        self.seen += Counter(
            steps=1,
            admitted=len(plan.admitted),
            preempted=len(plan.paused),
            timeouts=len(plan.finished),
            accepted=record.num_accepted,
            carried=int((result.outcome == native.STILL_PENDING).sum()),
            short_of_rows=int((plan.scheduled.max_verified < plan.scheduled.num_drafts).sum()),
            chunks=len(plan.scheduled) - plan.scheduled.num_sampled,
        )

    def check_blocks(self, item, end, held):
        """end: of the committed tokens that the pass runs; held: tokens that the request's blocks hold."""
        assert held >= end + item.num_drafts, "rows without blocks"

    def check_plan(self, plan):
        assert bool(plan.scheduled) == bool(self.live), "a step with requests must do some work"
        assert (plan.scheduled.num_new_tokens + plan.scheduled.max_verified).sum() <= self.limits.max_num_tokens
        requests = [s.request for s in plan.scheduled]
        assert all(r.state is RequestState.RUNNING for r in requests)
        assert len({r.slot for r in requests}) == len(requests) <= self.limits.max_batch_size
        if self.limits.capacity_policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
            assert len(plan.paused) <= 1, "for another client; never for blocks"
        for request in plan.admitted:
            self.seen["cached_tokens"] += request.num_computed_tokens
            self.seen["cached_without_draft"] += request.num_draft_computed_tokens < request.num_computed_tokens
        for item in plan.scheduled:
            request = item.request
            end = request.num_computed_tokens + item.num_new_tokens
            assert request.num_computed_tokens <= end <= request.num_tokens
            if not item.num_new_tokens:
                assert plan.mode is Mode.PING_PONG
                assert item.num_drafts > request.num_drafts, "a scheduled request must get on"
                self.seen["only_drafted"] += 1
            assert 0 <= item.max_verified <= item.num_drafts
            if request.is_decoding and request not in plan.admitted:
                assert request.num_drafts <= item.num_drafts <= max(request.num_drafts, request.draft_limit)
            else:  # drafts that it had when it was preempted wait until its context has run
                assert item.num_drafts == 0
            assert request.is_decoding or item.num_drafts == 0
            self.check_blocks(item, end, self.kv.num_held_blocks(request.slot) * self.kv.tokens_per_block)

    def check_output(self, output, broken):
        request, streamed = output.request, self.streamed[output.request.request_id]
        streamed += output.new_token_ids
        expected, reason = expected_output(request)
        assert streamed == expected[: len(streamed)]
        assert request.tokens[request.prompt_len : request.num_tokens].tolist() == streamed
        assert output.finish_reason is request.finish_reason
        assert request.stats.num_accepted_tokens <= request.stats.num_draft_tokens
        if output.finish_reason is None:
            assert not broken
            return
        del self.live[request.request_id]
        self.seen[output.finish_reason.value] += 1
        if broken and output.finish_reason is FinishReason.ERROR:
            assert request.error == "broken"
        elif not broken:
            assert (streamed, output.finish_reason) == (expected, reason)
