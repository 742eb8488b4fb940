"""Section "policies": off, fixed lengths, the schedule, gp_lcb and price, with pruning and overlap, by concurrency."""

from __future__ import annotations

import random
import statistics
from contextlib import ExitStack
from dataclasses import asdict

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines.costs import cost_file, measure_table
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import Pair, open_pair
from benchmarks.gpu.models.prompts import bench_prompts, max_tokens, prompt_len
from benchmarks.policies.options import OFF, POLICIES
from benchmarks.policies.report import Round
from benchmarks.policies.stopwatch import Stopwatch
from benchmarks.policies.systems import System
from benchmarks.policies.watch import StepWitness
from benchmarks.policies.workload import closed_loop, draw_jobs
from faser_trtllm.bench.stats import agreement
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.errors import ConfigError, FaserError
from faser_trtllm.policy.registry import make_policy

# Overlap alone: the same drafts as fixed:K, verified while drafting.
OVERLAPPED = {f"fixed:4 {mode}": f"fixed:4,mode={mode}" for mode in ("draft_ahead", "ping_pong")}
JOBS_PER_STREAM, MIN_JOBS = 2, 4
NUM_ROUNDS = 3  # the first is a warm-up, and counts if there is no time for another
NUM_FIXED_KEPT = 2
TEMPERATURE, SAMPLED_SHARE = 0.8, 0.5
MIN_SECONDS_PER_FORM = 30.0

Results = dict[tuple[int, str], list[Round]]


def run(bench: Bench) -> None:
    for form in bench.options.forms:
        if not bench.is_dry and bench.left_s < MIN_SECONDS_PER_FORM:
            bench.record.error(f"the time was over before {form}")
            return
        bench.record.attempt(form, lambda form=form: _form(bench, form))  # type: ignore[misc]
        if bench.is_dry:
            return


def spellings(bench: Bench) -> dict[str, str]:
    """Label -> policy."""
    fixed = {f"fixed:{k}": f"fixed:{k}" for k in bench.options.fixed}
    return {OFF: OFF} | fixed | OVERLAPPED | {k: v for k, v in POLICIES.items() if k != "price again"}


def _form(bench: Bench, form: str) -> None:
    levels = (1, 2) if bench.is_dry else bench.options.concurrency
    seq_len = prompt_len(bench) + max_tokens(bench) + 16
    rows = max(64 if bench.is_dry else 2048, 5 * max(levels))
    limits = PairLimits(max(levels), seq_len, rows, max(8, *bench.options.fixed))
    prompts = bench_prompts(bench)
    results: Results = {}
    shares: dict[tuple[int, str], float] = {}
    with open_pair(bench, form, limits, overlap=True) as pair, ExitStack() as stack:
        table = _table(bench, pair)
        systems = _open(bench, pair, table, stack)
        bench.record.value(f"described {form}", pair.describe())
        for concurrency in levels:
            for number in range(NUM_ROUNDS):
                names = _kept(list(systems), results, concurrency, number)
                random.Random(f"{bench.options.seed}/{number}/{concurrency}").shuffle(names)
                jobs = draw_jobs(
                    prompts.token_ids,
                    max(MIN_JOBS, JOBS_PER_STREAM * concurrency),
                    min_tokens=max(1, max_tokens(bench) // 3),
                    max_tokens=max_tokens(bench),
                    temperature=TEMPERATURE,
                    sampled_share=SAMPLED_SHARE,
                    seed=bench.options.seed + 1000 * number + concurrency,
                )
                names.sort(key=lambda name: name != OFF)  # the other settings' tokens are compared with its tokens
                reference: tuple[tuple[int, ...], ...] = ()
                for name in names:
                    if bench.left_s < 0:
                        break
                    found, result = systems[name].run(closed_loop(jobs, concurrency))
                    reference = reference or result.token_ids
                    shares[concurrency, name] = agreement(result.token_ids, reference).prefix_share
                    rounds = results.setdefault((concurrency, name), [])
                    if number == 1:
                        rounds.clear()
                    rounds.append(found)
                _write(bench, form, results, shares)
            if bench.left_s < 0:
                bench.record.error(f"{form}: the time was over at concurrency {concurrency}")
                return


def _table(bench: Bench, pair: Pair) -> CostTable:
    """The cost table of the section "costs" if it is for this GPU and pair, or another."""
    path = bench.file(cost_file(pair.name))
    if path.exists():
        try:
            return CostTable.load(path, bench.machine.fingerprint(pair.made_of))
        except ConfigError as error:
            bench.record.value(f"table of {pair.name} measured again", str(error))
    return measure_table(bench, pair, prompt_len(bench) + max_tokens(bench) // 2)


def _open(bench: Bench, pair: Pair, table: CostTable, stack: ExitStack) -> dict[str, System]:
    systems = {}
    limits = pair.limits
    for name, spelling in spellings(bench).items():
        try:
            policy = make_policy(spelling, limits.max_draft_len, table, limits.max_batch_size)
        except FaserError as error:
            bench.record.error(f"{pair.name}, {name}: {error}")
            continue
        clock = Stopwatch()
        witness = StepWitness(table, clock)
        executor = stack.enter_context(pair.executor(policy))
        executor.watch(witness)
        systems[name] = System(name, executor, policy, witness, clock)
    return systems


def _kept(names: list[str], results: Results, concurrency: int, number: int) -> list[str]:
    """After the first round, keep only the fastest fixed length."""
    if number == 0:
        return names
    fixed = [name for name in names if name.startswith("fixed:") and name not in OVERLAPPED]
    fixed.sort(key=lambda name: -max((r.tokens_per_s for r in results.get((concurrency, name), ())), default=0.0))
    return [name for name in names if name not in fixed[NUM_FIXED_KEPT:]]


def _write(bench: Bench, form: str, results: Results, shares: dict[tuple[int, str], float]) -> None:
    levels = list(dict.fromkeys(level for level, _ in results))
    names = list(dict.fromkeys(name for name in spellings(bench) if any(key[1] == name for key in results)))
    rates = {key: statistics.median(r.tokens_per_s for r in rounds) for key, rounds in results.items()}

    def cell(level: int, name: str) -> str | None:
        rate, off = rates.get((level, name)), rates.get((level, OFF))
        return None if rate is None else f"{rate:.0f}" + (f" ({rate / off:.2f})" if off else "")

    bench.record.table(
        f"{form}: output tokens per second (against off), by requests in flight",
        ("system", *map(str, sorted(levels))),
        [(name, *(cell(level, name) for level in sorted(levels))) for name in names],
        "Median of the rounds behind a first one that warms up, whole runs of requests with their prompts. Half of the "
        f"requests are greedy, half sampled with a seed at temperature {TEMPERATURE:g}. The target is a trained one, "
        "enlarged without a change of what it says: real acceptance, realistic cost.",
    )
    for level in sorted(levels):
        bench.record.table(
            f"{form}, {level} request(s) in flight",
            ("system", "rounds", "TTFT ms", "ms per token", "accepted", "drafts", "pruned", "of oracle", "as off"),
            [_details(name, results[level, name], shares[level, name]) for name in names if (level, name) in results],
            "as off: share of the tokens before the first that differs from off's (see the section exactness). of "
            "oracle: against a clairvoyant cut of the same drafts.",
        )
    bench.record.plot(
        f"{form}: against off",
        "requests in flight",
        "tokens per second / off",
        {
            name: {
                float(level): rates[level, name] / rates[level, OFF]
                for level in sorted(levels)
                if (level, name) in rates and (level, OFF) in rates
            }
            for name in names
        },
    )
    rounds = [{"concurrency": k[0], "system": k[1], "rounds": [asdict(r) for r in v]} for k, v in results.items()]
    bench.record.value(f"rounds {form}", rounds)


def _details(name: str, rounds: list[Round], share: float) -> tuple[object, ...]:
    def median(field: str) -> float | None:
        values = [v for r in rounds if (v := getattr(r, field)) is not None]
        return statistics.median(values) if values else None

    accepted = median("acceptance")
    return (
        name,
        len(rounds),
        f"{median('ttft_p50_ms'):.1f}",
        f"{median('per_token_p50_ms'):.2f}",
        None if accepted is None else f"{accepted:.2f}",
        f"{median('draft_len'):.1f}",
        f"{100 * (median('share_pruned') or 0):.0f}%",
        f"{median('oracle'):.2f}",
        f"{100 * share:.1f}%",
    )
