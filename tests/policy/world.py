"""A simulated machine and draft: a policy runs against known costs and known acceptance, on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.cost_table import CostSample, CostTable, Fingerprint
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingMode, SamplingParams
from faser_trtllm.policy.base import Mode, PlanStats, StepView
from faser_trtllm.sampling.table import SamplingTable
from lab.reference.draft_stop import next_worth
from tests.support.columns import columns

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 49, 64, 65, 80, 81, 96, 97, 128, 129, 192, 256)

STRETCHES_S = (0.2, 0.5, 1.0, 3.0)


def target_ms(rows: int) -> float:
    """The x4 demo pair's shape: tiles of 16 rows, and a slope."""
    return 1.1 + 0.45 * -(-rows // 16) + 0.125 * rows


def draft_ms(requests: int) -> float:
    return 0.05 + 0.0125 * requests


def cost_table(target=target_ms, draft=draft_ms, block=None) -> CostTable:
    """draft, block: of a draft step and, of a block drafter, of its pass over blocks next to the first draft, by
    requests."""
    kind = "draft_rows" if block is None else "draft_block"
    first_ms = draft if block is None else lambda k: block(k) + draft(k)
    samples = [CostSample("verify", n, 1, 64, target(n)) for n in ROWS]
    samples += [CostSample("draft_step", n, n, 64, draft(n)) for n in (1, 2, 4, 8, 16, 32)]
    samples += [
        CostSample(kind, n, k, 64, first_ms(k) + 0.001 * (n - k))
        for k in (1, 8, 32)
        for n in (k, 16, 64, 256)
        if n >= k
    ]
    return CostTable.fit(samples, Fingerprint("test", "test", 2, "test"))


PARAMS = {
    SamplingMode.GREEDY: {},
    SamplingMode.SEEDED: {"temperature": 0.8, "seed": 1},
    SamplingMode.SAMPLED: {"temperature": 0.8},
}


def request(
    name: str, max_draft_len: int = 8, max_tokens: int = 4000, slot: int = 0, mode: int = SamplingMode.GREEDY
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **PARAMS[SamplingMode(mode)])
    made = Request(name, [1] * 8, params, max_seq_len=5000, max_draft_len=max_draft_len)
    made.slot = slot
    made.num_computed_tokens = made.num_tokens - 1
    return made


@dataclass
class World:
    """acceptance(rng, request index, place) -> (margin, probability of acceptance) of a new draft.

    block: ms of a block drafter's pass, by requests: it drafts for those without pending drafts, and computes all that
    are wanted, whatever stops it.

    slowdown: for stretches of STRETCHES_S the machine is up to so many times slower; run() leaves that out of its rate.
    """

    policy: object
    num_requests: int
    acceptance: object
    max_draft_len: int = 8
    target: object = target_ms
    draft: object = draft_ms
    block: object = None
    noise: float = 0.0
    slowdown: float = 1.0
    overhead_ms: float = 0.02
    num_waiting: int = 0
    seed: int = 0
    now_s: float = 0.0
    num_held: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    drafted_lengths: list = field(default_factory=list)
    verified_lengths: list = field(default_factory=list)

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.requests = [request(f"r{i}", self.max_draft_len, slot=i) for i in range(self.num_requests)]
        self.sampling = SamplingTable(self.num_requests, 4, self.max_draft_len)
        for r in self.requests:
            self.sampling.bind(r.slot, r)
        self.stats, self.num_plans, self.was_drafting, self.num_draft_rows = {}, 0, False, 0
        self.names = self.num_requests
        self.slowness, self.until_s, self.nominal_ms = 1.0, 0.0, 0.0
        self.good = {}  # (request id, position) -> whether that draft would pass

    def run(self, num_steps: int) -> float:
        """Return tokens per ms over these steps."""
        start_ms, tokens = self.nominal_ms, self.num_tokens
        for _ in range(num_steps):
            self.step()
        return (self.num_tokens - tokens) / (self.nominal_ms - start_ms)

    def step(self):
        if self.num_held:
            self.num_held -= 1
            view, plan = self.held
        else:
            if self.stats:
                self.policy.observe(PlanStats(**self.stats))
                self.stats = {}
            view = StepView(self.requests, 0, self.num_waiting, self.now_s)
            plan = self.policy.plan(view)
            self.num_plans += 1
            self.held, self.num_held = (view, plan), plan.num_held
        assert plan.mode is Mode.SERIAL
        new, spent_ms = self._draft(plan)
        num_draft_rows = round(1.5 * sum(n > 0 for n in new)) if self.block is None else self.num_draft_rows * any(new)
        pending = [r.num_drafts + n for r, n in zip(self.requests, new, strict=True)]
        slots, known = [r.slot for r in self.requests], [r.num_tokens for r in self.requests]
        verified = pending
        if plan.verification is not None:
            counts = columns(slots, known, pending)
            verified = plan.verification.lengths(self.sampling.array, *counts).tolist()
        assert all(0 <= v <= p for v, p in zip(verified, pending, strict=True))
        tested, accepted, tokens = [], [], []
        for r, p, v in zip(self.requests, pending, verified, strict=True):
            t = a = 0
            while t < min(p, v + 1):
                t += 1
                if not self.good[r.request_id, r.num_tokens + t - 1]:
                    break
                a += 1
            tested.append(t)
            accepted.append(a)
            tokens.append(a if a == t and p > v else a + 1)
        rows = len(self.requests) + sum(verified)
        noise = 1.0 + self.noise * abs(self.rng.standard_normal())
        if self.slowdown > 1.0 and self.now_s >= self.until_s:
            self.until_s = self.now_s + self.rng.choice(STRETCHES_S)
            self.slowness = self.slowdown ** self.rng.random()
        self.nominal_ms += (spent_ms + self.target(rows)) * noise + self.overhead_ms
        noise *= self.slowness
        verify_ms = self.target(rows) * noise
        host_ms = self.slowness * self.overhead_ms
        self.now_s += 1e-3 * (spent_ms * noise + verify_ms + host_ms)
        if plan.tested is not None and any(pending):
            outcome = [native.RECOVERED if t > a else native.BONUS for t, a in zip(tested, accepted, strict=True)]
            plan.tested.add(self.sampling.array, *columns(slots, known, accepted, outcome))
        is_drafting = any(plan.lengths)
        if is_drafting is self.was_drafting:
            seen = {
                "num_steps": 1, "ms": spent_ms * noise + verify_ms + host_ms, "draft_ms": spent_ms * noise,
                "verify_ms": verify_ms, "num_tokens": sum(tokens), "num_requests": len(slots), "num_rows": rows,
                "num_verified": sum(verified), "num_accepted": sum(accepted), "num_draft_calls": int(any(new)),
                "num_draft_rows": num_draft_rows, "num_draft_steps": max(new),
                "num_drafted": sum(new),
            }  # fmt: skip
            self.stats = {name: self.stats.get(name, 0) + value for name, value in seen.items()}
        self.was_drafting = is_drafting
        for i, (r, p, t, a, n) in enumerate(zip(self.requests, pending, tested, accepted, tokens, strict=True)):
            r.num_tokens += n
            r.num_computed_tokens = r.num_tokens - 1
            r.num_drafts = p - a if a == t and n == a else 0
            self.num_tokens += n
            if r.num_tokens > r.max_num_tokens - 50:
                self.requests[i] = request(f"r{self.names}", self.max_draft_len, slot=i)
                self.sampling.bind(i, self.requests[i])
                self.names += 1
                self.num_held = 0
        self.num_drafted += sum(new)
        self.drafted_lengths.append(pending)
        self.verified_lengths.append(verified)

    def _block_ms(self, wanted, drafting):
        """Return the ms of a block drafter's call that wants so many drafts of each request."""
        requests = [self.requests[i] for i in drafting]
        self.num_draft_rows = sum(r.num_tokens - r.num_draft_computed_tokens for r in requests)
        places_ms = sum(self.draft(sum(n > place for n in wanted)) for place in range(max(wanted)))
        return self.block(len(requests)) + places_ms + 0.001 * (self.num_draft_rows - len(requests))

    def _draft(self, plan):
        """The rule of DraftStop, as ops/draft_stop.py has it."""
        new = [0] * len(self.requests)
        wanted = [
            max(0, min(n, r.draft_limit) - r.num_drafts) for n, r in zip(plan.lengths, self.requests, strict=True)
        ]
        if self.block is not None:
            wanted = [0 if r.num_drafts else n for n, r in zip(wanted, self.requests, strict=True)]
        going = [i for i, n in enumerate(wanted) if n > 0]
        spent = self._block_ms(wanted, going) if self.block is not None and going else 0.0
        while going:
            spent += self.draft(len(going)) if self.block is None else 0.0
            after = []
            for i in going:
                r = self.requests[i]
                place = r.num_drafts + new[i]
                r.num_draft_computed_tokens = r.num_tokens
                margin, p = self.acceptance(self.rng, i, place)
                r.draft_margins[r.num_tokens + place] = margin
                self.good[r.request_id, r.num_tokens + place] = self.rng.random() < p
                new[i] += 1
                if new[i] < wanted[i]:
                    after.append(i)
            going = after
            stop = plan.stop
            if stop is not None and going:
                modes, places, survival = [], [], []
                for i in going:
                    r = self.requests[i]
                    m = r.draft_margins[r.num_tokens : r.num_tokens + r.num_drafts + new[i]]
                    k = len(m)
                    slope, intercept = stop.slope[r.sampling_mode, :k], stop.intercept[r.sampling_mode, :k]
                    modes.append(r.sampling_mode)
                    places.append(k)
                    survival.append(float(np.prod(1 / (1 + np.exp(-(slope * m + intercept))))))
                worth = next_worth(stop, np.array(modes), np.array(places), np.array(survival)).tolist()
                going = [i for i, w in zip(going, worth, strict=True) if w >= 0.0]
                if sum(w for w in worth if w >= 0.0) < stop.step_price[len(going)]:
                    going = []
        return new, spent


def logistic(slope: float, intercept: float, spread: float = 2.0):
    """Drafts whose margin is exponential with mean `spread` and tells their acceptance."""

    def draw(rng, index, place):
        margin = rng.exponential(spread)
        return margin, 1 / (1 + np.exp(-(slope * margin + intercept)))

    return draw


def constant(p: float, margin: float = 1.0):
    return lambda rng, index, place: (margin, p)
