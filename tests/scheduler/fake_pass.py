"""A scheduler whose forward passes are made up, for rules of rows, capacity and order."""

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.plan import DraftResult, StepRecord, VerifyResult
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.kvcache.manager import KVCacheManager
from faser_trtllm.policy.static import FixedPolicy, OffPolicy
from faser_trtllm.scheduler.scheduler import Scheduler, SchedulerLimits
from lab.clock import ManualClock
from tests.support.columns import columns


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
        """Return the plan, each request's (id, rows of tokens, drafts wanted) by admission, and the outputs."""
        plan = self.scheduler.schedule()
        rows, items = plan.scheduled, list(plan.scheduled)
        order = sorted(items, key=lambda item: int(item.request.request_id))
        shares = [(s.request.request_id, s.num_new_tokens, s.num_drafts) for s in order]
        drafted, verified, found = [], [], []
        ids = np.full((rows.num_sampled, self.max_draft_len + 1), token, np.int32)
        for index, item in enumerate(items):
            request = item.request
            drafted.append(item.num_drafts - request.num_drafts if request.is_decoding else 0)
            start = request.num_tokens + request.num_drafts
            request.tokens[start : start + drafted[-1]] = 60 + np.arange(drafted[-1])
            pending = request.num_drafts + drafted[-1]
            verified.append(min(item.max_verified, pending, trim) if index < rows.num_sampled else 0)
            if index < rows.num_sampled:
                accepted = min(accept, verified[-1] + (1 if carry and verified[-1] < pending else 0))
                stays = carry and accepted == verified[-1] + 1
                ids[index, :accepted] = request.tokens[request.num_tokens : request.num_tokens + accepted]
                found.append((accepted + (not stays), accepted, native.STILL_PENDING if stays else native.BONUS))
        drafts = DraftResult(*columns(drafted, rows.num_computed + rows.num_new_tokens))
        result = VerifyResult(ids, *columns(*np.array(found).reshape(-1, 3).T, verified))
        outputs = self.scheduler.update(plan, drafts, result)
        self.scheduler.observe(StepRecord.of(plan, drafts, result, (0.0,) * 4))
        self.scheduler.check_integrity()
        return plan, shares, outputs
