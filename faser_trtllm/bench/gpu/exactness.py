"""Section "exactness": speculation must not change what is said.

Greedy: the tokens of every speculation setting against those of the same engine without. A matrix product of one row
and of five may differ in the last bit, so that two tokens of equal logit may change places: each first difference is
traced to the gap between the two logits, and is a fault unless bf16 cannot tell them apart. Sampled: chi-square.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from faser_trtllm import native
from faser_trtllm.bench.gpu.bench import Bench
from faser_trtllm.bench.gpu.cuda_engines import TOKENS_PER_BLOCK, PairLimits
from faser_trtllm.bench.gpu.pair import Pair, open_pair
from faser_trtllm.bench.gpu.prompts import bench_prompts, max_tokens, prompt_len
from faser_trtllm.bench.gpu.row_kernels import AcceptCase
from faser_trtllm.bench.policies.drive import drive
from faser_trtllm.bench.policies.workload import Job, closed_loop
from faser_trtllm.bench.stats import first_difference
from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.ops.arrays import Float32Array
from faser_trtllm.policy.registry import make_policy

FORM = "1B"
SPELLINGS = ("fixed:4", "fixed:8", "gp_lcb", "fixed:4,mode=draft_ahead", "fixed:4,mode=ping_pong")
CONCURRENCY, DRY_CONCURRENCY = 16, 2
NUM_SAMPLES, DRY_NUM_SAMPLES = 3000, 40  # requests of one prompt
NUM_LAW_REQUESTS, DRY_NUM_LAW_REQUESTS = 20_000, 400
SAMPLED_TOKENS, SAMPLED_TOP_K = 3, 3
BF16_STEP = 2.0**-7  # two roundings to bf16 can part two numbers by so much of their size
MIN_P_VALUE = 1e-4


def run(bench: Bench) -> None:
    bench.record.attempt("law of the acceptance kernel", lambda: _law_of_accept(bench))
    bench.record.attempt("the executor's tokens", lambda: _executor(bench))


@dataclass(frozen=True)
class Difference:
    """Where one request's tokens first differ from those without speculation. gap: of the two tokens' logits. noise:
    by how much either logit changes with the shape of the pass."""

    setting: str
    request: int
    place: int
    gap: float
    noise: float
    size: float

    @property
    def is_tie(self) -> bool:
        return self.gap <= BF16_STEP * self.size + 2 * self.noise


def _executor(bench: Bench) -> None:
    gpu = bench.machine.is_gpu
    concurrency = CONCURRENCY if gpu else DRY_CONCURRENCY
    batch_size = max(concurrency, 256 if gpu else 8)
    limits = PairLimits(batch_size, prompt_len(bench) + max_tokens(bench) + 16, 2048 if gpu else 64)
    with open_pair(bench, FORM, limits, overlap=True) as pair:
        bench.record.attempt("greedy tokens", lambda: greedy(bench, pair, concurrency, SPELLINGS))
        bench.record.attempt("sampled tokens", lambda: _sampled(bench, pair, batch_size))


def greedy(bench: Bench, pair: Pair, concurrency: int, settings: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Record how the settings' greedy tokens agree with those without speculation -> the latter, by prompt."""
    prompts = bench_prompts(bench).token_ids
    params = SamplingParams(max_tokens=max_tokens(bench))
    jobs = tuple(Job(prompt, params) for prompt in prompts)
    wanted = tokens_of(pair, "off", jobs, concurrency)
    rows, differences = [], []
    for setting in settings:
        found = tokens_of(pair, setting, jobs, concurrency)
        here = [
            _trace(pair, setting, i, prompt, got, want)
            for i, (prompt, got, want) in enumerate(zip(prompts, found, wanted, strict=True))
            if got != want
        ]
        differences += here
        faults = sum(not d.is_tie for d in here)
        rows.append((setting, len(prompts), len(prompts) - len(here), len(here) - faults, faults))
        bench.record.table(
            "Greedy tokens against those without speculation",
            ("setting", "requests", "identical", "part at a tie", "part without one"),
            rows,
            "A tie: the two tokens' logits differ by less than bf16 and the shape of a pass can part them.",
        )
    if differences:
        bench.record.table(
            "Where they part",
            ("setting", "request", "token", "gap of logits", "noise", "logit", "tie"),
            [
                (d.setting, d.request, d.place, f"{d.gap:.4f}", f"{d.noise:.4f}", f"{d.size:.2f}", d.is_tie)
                for d in differences
            ],
        )
    bench.record.value("num_faults", sum(not d.is_tie for d in differences))
    for d in differences:
        if not d.is_tie:
            bench.record.error(f"{d.setting}: request {d.request} parts at token {d.place}, logits {d.gap:.4f} apart")
    return wanted


def tokens_of(pair: Pair, spelling: str, jobs: Sequence[Job], concurrency: int) -> tuple[tuple[int, ...], ...]:
    """The jobs' tokens under a policy, so many jobs at a time."""
    policy = make_policy(spelling, pair.limits.max_draft_len, None, pair.limits.max_batch_size)
    with ExitStack() as stack:
        executor = stack.enter_context(pair.executor(policy))
        return drive(executor, closed_loop(tuple(jobs), concurrency)).token_ids


def _trace(
    pair: Pair, setting: str, request: int, prompt: Sequence[int], found: Sequence[int], wanted: Sequence[int]
) -> Difference:
    where = first_difference([found], [wanted])
    assert where is not None
    place = where[1]
    both = [tokens[place] for tokens in (found, wanted) if place < len(tokens)]
    known = [*prompt, *wanted[:place]]
    # The same row as the last of a whole pass, alone, and behind a frontier of five.
    seen = np.array([last_logits(pair, known, rows)[both] for rows in (len(known), 1, min(5, len(known)))])
    gap = float(abs(seen[1][0] - seen[1][-1])) if len(both) == 2 else math.inf
    noise = float((seen.max(0) - seen.min(0)).max())
    return Difference(setting, request, place, gap, noise, float(np.abs(seen).max()))


def last_logits(pair: Pair, tokens: Sequence[int], num_rows: int) -> Float32Array:
    """Logits [vocab_size] behind the last token, whose pass has num_rows rows; the others are run before it."""
    blocks = -(-pair.limits.max_seq_len // TOKENS_PER_BLOCK)
    table = np.arange(blocks, dtype=np.int32).reshape(1, blocks)
    ids, cut = np.array(tokens, np.int32), len(tokens) - num_rows
    most = pair.target.spec.max_num_tokens
    ends = [*range(most, cut, most), *([cut] if cut else []), *range(cut + most, len(ids), most), len(ids)]
    first = 0
    for end in ends:
        builder = BatchBuilder(1, end - first, len(ids), table)
        builder.add(0, ids, first, end, 1)
        pair.target.run_rows(builder.build())
        first = end
    return np.array(pair.target.host_logits(1)[0])


def _sampled(bench: Bench, pair: Pair, concurrency: int) -> None:
    """The joint law of a few tokens behind one prompt, with and without speculation: a chi-square of two samples."""
    prompt = bench_prompts(bench).token_ids[0]
    num_samples = NUM_SAMPLES if bench.machine.is_gpu else DRY_NUM_SAMPLES
    params = SamplingParams(max_tokens=SAMPLED_TOKENS, temperature=1.0, top_k=SAMPLED_TOP_K)
    jobs = [Job(prompt, params)] * num_samples
    samples = {name: Counter(tokens_of(pair, name, jobs, concurrency)) for name in ("off", "fixed:2", "fixed:4")}
    rows = []
    for name in ("fixed:2", "fixed:4"):
        statistic, freedom = two_samples(samples["off"], samples[name])
        p_value = chi_square_tail(statistic, freedom)
        rows.append((name, num_samples, freedom, f"{statistic:.1f}", f"{p_value:.3f}"))
        if p_value < MIN_P_VALUE:
            bench.record.error(f"sampled tokens with {name} have another law than without: p = {p_value:.2g}")
    header = ("setting", "samples each", "degrees of freedom", "chi-square", "p")
    note = f"The first {SAMPLED_TOKENS} tokens of one prompt at temperature 1, top_k {SAMPLED_TOP_K}, no seed."
    bench.record.table("Sampled tokens with speculation against without", header, rows, note)


def _law_of_accept(bench: Bench) -> None:
    """Drafts drawn from q, tested on rows with the law p: the first token must have the law p, whatever q is."""
    launcher = bench.machine.launcher("accept")
    if launcher is None:
        bench.record.value("law of accept", "not run: no kernels in a dry run")
        return
    n = NUM_LAW_REQUESTS if bench.machine.is_gpu else DRY_NUM_LAW_REQUESTS
    vocab_size, rows = 12, []
    rng = np.random.default_rng(bench.options.seed)
    p_logits, q = (2 * rng.standard_normal(vocab_size)).astype(np.float32), rng.dirichlet(np.full(vocab_size, 0.7))
    law = np.exp(p_logits - p_logits.max(), dtype=np.float64)
    law /= law.sum()
    drafts = rng.choice(vocab_size, size=(n, 1), p=q)
    probs = np.broadcast_to(q.astype(np.float32), (n, 1, vocab_size))
    keys = rng.integers(1, 2**62, n).tolist()
    case = AcceptCase(bench.machine, native.SAMPLED, np.tile(p_logits, (2 * n, 1)), drafts, probs, keys)
    case.launch(launcher)
    found = np.bincount(case.found().token_ids[:, 0], minlength=vocab_size)
    statistic = float(((found - n * law) ** 2 / (n * law)).sum())
    p_value = chi_square_tail(statistic, vocab_size - 1)
    rows.append((n, vocab_size, f"{statistic:.1f}", f"{p_value:.3f}"))
    bench.record.table("Law of the acceptance kernel's token", ("requests", "vocabulary", "chi-square", "p"), rows)
    if p_value < MIN_P_VALUE:
        bench.record.error(f"the acceptance kernel's token has another law than the target's: p = {p_value:.2g}")


def two_samples(left: Counter[tuple[int, ...]], right: Counter[tuple[int, ...]]) -> tuple[float, int]:
    """Chi-square of homogeneity -> (statistic, degrees of freedom); cells with fewer than 5 expected are pooled."""
    totals = [left.total(), right.total()]
    cells: list[tuple[int, int]] = []
    pooled = [0, 0]
    for key in sorted(left.keys() | right.keys()):
        pair = (left[key], right[key])
        if min(totals) / sum(totals) * sum(pair) >= 5:
            cells.append(pair)
        else:
            pooled = [pooled[0] + pair[0], pooled[1] + pair[1]]
    if sum(pooled):
        cells.append((pooled[0], pooled[1]))
    statistic = 0.0
    for pair in cells:
        for count, total in zip(pair, totals, strict=True):
            expected = sum(pair) * total / sum(totals)
            statistic += (count - expected) ** 2 / expected
    return statistic, len(cells) - 1


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability of a chi-square beyond the statistic (Wilson and Hilferty 1931, to about 0.001)."""
    if freedom < 1:
        return 1.0
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))
