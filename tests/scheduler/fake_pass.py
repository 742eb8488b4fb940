"""A scheduler whose forward passes are made up, for rules of rows, capacity and order."""

import numpy as np

from faser_trtllm.core.clock import ManualClock
from faser_trtllm.core.plan import DraftResult, VerifyResult
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.kvcache.manager import KVCacheManager
from faser_trtllm.policy.static import FixedPolicy, OffPolicy
from faser_trtllm.scheduler.scheduler import Scheduler, SchedulerLimits


class Bench:
    """A scheduler with a fake pass: every draft is accepted up to `accept`, then token 1 is drawn."""

    def __init__(self, *, drafts=0, policy=None, num_blocks=64, tokens_per_block=4, max_seq_len=64, **limits):
        limits = {"max_batch_size": 4, "max_num_tokens": 32, "chunk_unit_size": 4} | limits
        self.kv = KVCacheManager(
            num_blocks, tokens_per_block, limits["max_batch_size"], -(-max_seq_len // tokens_per_block)
        )
        self.clock = ManualClock()
        self.max_draft_len = 8 if drafts else 0
        self.policy = policy or (FixedPolicy(drafts) if drafts else OffPolicy())
        self.limits = SchedulerLimits(max_seq_len=max_seq_len, max_draft_len=self.max_draft_len, **limits)
        self.scheduler = Scheduler(self.kv, self.limits, self.policy, self.clock)
        self.count = 0

    def add(self, prompt_len, max_tokens=8, priority=0.5, deadline_s=None, first=0, **params):
        request = Request(
            str(self.count),
            np.arange(first, first + prompt_len) % 50,
            SamplingParams(max_tokens=max_tokens, **params),
            max_seq_len=self.limits.max_seq_len,
            max_draft_len=self.max_draft_len,
            priority=priority,
            deadline_s=deadline_s,
        )
        self.count += 1
        self.scheduler.check(request)
        self.scheduler.add(request)
        return request

    def step(self, accept=0, carry=False, token=51, trim=64):
        plan = self.scheduler.schedule()
        rows = [(s.request.request_id, s.num_new_tokens, s.num_drafts) for s in plan.scheduled]
        new, tokens, accepted, verified = [], [], [], []
        ids = np.full((len(plan.scheduled), self.max_draft_len + 1), token, np.int32)
        for index, item in enumerate(plan.scheduled):
            request = item.request
            drafted = item.num_drafts - request.num_drafts if request.is_decoding else 0
            start = request.num_tokens + request.num_drafts
            request.tokens[start : start + drafted] = 60 + np.arange(drafted)
            pending = request.num_drafts + drafted
            if not item.reaches_end:
                num_tokens = num_accepted = num_verified = 0
            else:
                num_verified = min(item.max_verified, pending, trim)
                num_accepted = min(accept, num_verified + (1 if carry and num_verified < pending else 0))
                is_carried = carry and num_accepted == num_verified + 1
                ids[index, :num_accepted] = request.tokens[request.num_tokens : request.num_tokens + num_accepted]
                num_tokens = num_accepted + (0 if is_carried else 1)
            new.append(drafted)
            tokens.append(num_tokens)
            accepted.append(num_accepted)
            verified.append(num_verified)
        carried = tuple(a == v + 1 for a, v in zip(accepted, verified, strict=True))
        n = len(rows)
        drafts = DraftResult(
            tuple(new), tuple(s.request.num_computed_tokens + s.num_new_tokens for s in plan.scheduled)
        )
        result = VerifyResult(ids, tuple(tokens), tuple(accepted), tuple(verified), carried, ("",) * n, (False,) * n)
        outputs = self.scheduler.update(plan, drafts, result)
        self.scheduler.check_integrity()
        return plan, rows, outputs
