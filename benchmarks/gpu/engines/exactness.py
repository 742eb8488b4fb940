"""Section "exactness": speculation must not change the output.

Greedy tokens of every speculation setting are compared with those of the same engine without. A GEMM of one row and one
of five may differ in the last bit, so tokens with equal logits may swap: a first difference is an error unless bf16
cannot resolve the gap between the two logits. Sampled tokens are compared by chi-square.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from benchmarks.agreement import first_difference
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.acceptance import AcceptCase
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import OpenPair, open_pair
from benchmarks.gpu.models.prompts import bench_prompts, max_tokens, prompt_len
from benchmarks.policies.drive import drive
from benchmarks.policies.workload import Job, closed_loop
from faser_trtllm import native
from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.ops.arrays import Float32Array
from faser_trtllm.policy.base import Policy
from faser_trtllm.policy.registry import make_policy

FORM = "1B"
SPELLINGS = ("fixed:4", "fixed:8", "gp_lcb", "fixed:4,mode=draft_ahead", "fixed:4,mode=ping_pong")
CONCURRENCY, DRY_CONCURRENCY = 16, 2
NUM_SAMPLES, DRY_NUM_SAMPLES = 3000, 40  # requests of one prompt
NUM_CHI_SQUARE_REQUESTS, DRY_NUM_CHI_SQUARE_REQUESTS = 20_000, 400
SAMPLED_TOKENS, SAMPLED_TOP_K = 3, 3
BF16_STEP = 2.0**-7  # relative difference that two roundings to bf16 can cause
MIN_P_VALUE = 1e-4


def run(bench: Bench) -> None:
    bench.record.attempt("distribution of the acceptance kernel", lambda: _accept_distribution(bench))
    bench.record.attempt("the executor's tokens", lambda: _executor(bench))


@dataclass(frozen=True)
class Difference:
    """The first difference of a request's tokens from those without speculation.

    gap: difference of the two tokens' logits. noise: change of either logit with the shape of the pass.
    """

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
    dry = bench.is_dry
    concurrency = DRY_CONCURRENCY if dry else CONCURRENCY
    batch_size = max(concurrency, 8 if dry else 256)
    limits = PairLimits(batch_size, prompt_len(bench) + max_tokens(bench) + 16, 64 if dry else 2048)
    with open_pair(bench, FORM, limits, overlap=True) as pair:
        policies = {spelling: policy_of(pair, spelling) for spelling in SPELLINGS}
        bench.record.attempt("greedy tokens", lambda: greedy(bench, pair, concurrency, policies))
        bench.record.attempt("sampled tokens", lambda: _sampled(bench, pair, batch_size))


def greedy(
    bench: Bench, pair: OpenPair, concurrency: int, policies: Mapping[str, Policy]
) -> tuple[tuple[int, ...], ...]:
    """Record the agreement of policies' greedy tokens with those without speculation; return the latter, by prompt."""
    prompts = bench_prompts(bench).token_ids
    params = SamplingParams(max_tokens=max_tokens(bench))
    jobs = tuple(Job(prompt, params) for prompt in prompts)
    wanted = tokens_of(pair, "off", jobs, concurrency)
    rows, differences = [], []
    for setting, policy in policies.items():
        found, num_pruned = run_jobs(pair, policy, jobs, concurrency)
        here = [
            _trace(pair, setting, i, prompt, got, want)
            for i, (prompt, got, want) in enumerate(zip(prompts, found, wanted, strict=True))
            if got != want
        ]
        differences += here
        faults = sum(not d.is_tie for d in here)
        rows.append((setting, len(prompts), num_pruned, len(prompts) - len(here), len(here) - faults, faults))
        bench.record.table(
            "Greedy tokens against those without speculation",
            ("setting", "requests", "rows pruned", "identical", "part at a tie", "part without one"),
            rows,
            "A tie: the two tokens' logits differ by less than bf16 and the shape of a pass can part them.",
        )
    record_differences(bench, differences)
    return wanted


def record_differences(bench: Bench, differences: Sequence[Difference], what: str = "") -> None:
    """Record first differences, and an error for each one that is not a tie. what: a suffix of the titles."""
    if differences:
        bench.record.table(
            f"Where they part{what}",
            ("setting", "request", "token", "gap of logits", "noise", "logit", "tie"),
            [
                (d.setting, d.request, d.place, f"{d.gap:.4f}", f"{d.noise:.4f}", f"{d.size:.2f}", d.is_tie)
                for d in differences
            ],
        )
    bench.record.value(f"num_faults{what}", sum(not d.is_tie for d in differences))
    for d in differences:
        if not d.is_tie:
            where = f"request {d.request} parts{what} at token {d.place}"
            bench.record.error(f"{d.setting}: {where}, logits {d.gap:.4f} apart")


def tokens_of(pair: OpenPair, spelling: str, jobs: Sequence[Job], concurrency: int) -> tuple[tuple[int, ...], ...]:
    """Return the jobs' tokens under a policy, with this many concurrent jobs."""
    return run_jobs(pair, policy_of(pair, spelling), jobs, concurrency)[0]


def policy_of(pair: OpenPair, spelling: str) -> Policy:
    """Return a policy that needs no costs."""
    return make_policy(spelling, pair.limits.max_draft_len, None, pair.limits.max_batch_size)


def run_jobs(
    pair: OpenPair, policy: Policy, jobs: Sequence[Job], concurrency: int
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Return tokens_of() and the number of pruned rows."""
    with ExitStack() as stack:
        executor = stack.enter_context(pair.executor(policy))
        tokens = drive(executor, closed_loop(tuple(jobs), concurrency)).token_ids
        return tokens, int(executor.stats()["num_pruned_rows"])


def _trace(
    pair: OpenPair, setting: str, request: int, prompt: Sequence[int], found: Sequence[int], wanted: Sequence[int]
) -> Difference:
    where = first_difference([found], [wanted])
    assert where is not None
    place = where[1]
    both = [tokens[place] for tokens in (found, wanted) if place < len(tokens)]
    known = [*prompt, *wanted[:place]]
    # The same row as the last of a full pass, alone, and last of five.
    seen = np.array([last_logits(pair, known, rows)[both] for rows in (len(known), 1, min(5, len(known)))])
    gap = float(abs(seen[1][0] - seen[1][-1])) if len(both) == 2 else math.inf
    noise = float((seen.max(0) - seen.min(0)).max())
    return Difference(setting, request, place, gap, noise, float(np.abs(seen).max()))


def last_logits(pair: OpenPair, tokens: Sequence[int], num_rows: int) -> Float32Array:
    """Return logits [vocab_size] after the last token, from a pass of num_rows rows; earlier tokens run before it."""
    blocks = -(-pair.limits.max_seq_len // pair.target.spec.tokens_per_block)
    table = np.arange(blocks, dtype=np.int32).reshape(1, blocks)
    ids, cut = np.array(tokens, np.int32), len(tokens) - num_rows
    most = pair.target.spec.max_num_tokens
    ends = [*range(most, cut, most), *([cut] if cut else []), *range(cut + most, len(ids), most), len(ids)]
    first = 0
    for end in ends:
        builder = BatchBuilder(table)
        builder.add(0, ids, first, end, 1)
        pair.target.run_rows(builder.build())
        first = end
    return np.array(pair.target.host_logits(1)[0])


def _sampled(bench: Bench, pair: OpenPair, concurrency: int) -> None:
    """Compare the joint distribution of a prompt's first tokens with and without speculation by chi-square."""
    prompt = bench_prompts(bench).token_ids[0]
    num_samples = DRY_NUM_SAMPLES if bench.is_dry else NUM_SAMPLES
    params = SamplingParams(max_tokens=SAMPLED_TOKENS, temperature=1.0, top_k=SAMPLED_TOP_K)
    jobs = [Job(prompt, params)] * num_samples
    samples = {name: Counter(tokens_of(pair, name, jobs, concurrency)) for name in ("off", "fixed:2", "fixed:4")}
    rows = []
    for name in ("fixed:2", "fixed:4"):
        statistic, freedom = two_samples(samples["off"], samples[name])
        p_value = chi_square_tail(statistic, freedom)
        rows.append((name, num_samples, freedom, f"{statistic:.1f}", f"{p_value:.3f}"))
        if p_value < MIN_P_VALUE:
            bench.record.error(f"sampled tokens with {name} and without differ in distribution: p = {p_value:.2g}")
    header = ("setting", "samples each", "degrees of freedom", "chi-square", "p")
    note = f"The first {SAMPLED_TOKENS} tokens of one prompt at temperature 1, top_k {SAMPLED_TOP_K}, no seed."
    bench.record.table("Sampled tokens with speculation against without", header, rows, note)


def _accept_distribution(bench: Bench) -> None:
    """Test drafts drawn from q on rows with probabilities p: the first token must be distributed as p."""
    launcher = bench.machine.launcher("accept")
    if launcher is None:
        bench.record.value("distribution of accept", "not run: no kernels in a dry run")
        return
    n = DRY_NUM_CHI_SQUARE_REQUESTS if bench.is_dry else NUM_CHI_SQUARE_REQUESTS
    vocab_size, rows = 12, []
    rng = np.random.default_rng(bench.options.seed)
    p_logits, q = (2 * rng.standard_normal(vocab_size)).astype(np.float32), rng.dirichlet(np.full(vocab_size, 0.7))
    target_probs = np.exp(p_logits - p_logits.max(), dtype=np.float64)
    target_probs /= target_probs.sum()
    drafts = rng.choice(vocab_size, size=(n, 1), p=q)
    probs = np.broadcast_to(q.astype(np.float32), (n, 1, vocab_size))
    keys = rng.integers(1, 2**62, n).tolist()
    case = AcceptCase(bench.machine, native.SAMPLED, np.tile(p_logits, (2 * n, 1)), drafts, probs, keys)
    case.launch(launcher)
    found = np.bincount(case.found().token_ids[:, 0], minlength=vocab_size)
    statistic = float(((found - n * target_probs) ** 2 / (n * target_probs)).sum())
    p_value = chi_square_tail(statistic, vocab_size - 1)
    rows.append((n, vocab_size, f"{statistic:.1f}", f"{p_value:.3f}"))
    header = ("requests", "vocabulary", "chi-square", "p")
    bench.record.table("Distribution of the acceptance kernel's token", header, rows)
    if p_value < MIN_P_VALUE:
        bench.record.error(f"the acceptance kernel's token does not follow the target: p = {p_value:.2g}")


def two_samples(left: Counter[tuple[int, ...]], right: Counter[tuple[int, ...]]) -> tuple[float, int]:
    """Return statistic and degrees of freedom of a chi-square of homogeneity; cells below 5 expected are pooled."""
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
    """Return the probability of a larger chi-square (Wilson and Hilferty 1931, to about 0.001)."""
    if freedom < 1:
        return 1.0
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))
