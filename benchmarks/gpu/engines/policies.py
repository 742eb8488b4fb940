"""Sections "policies" (off, fixed lengths, price) and "other_policies" (others, pruning, overlap).

They record tokens per second by concurrency, each against off in the same round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

from benchmarks.agreement import agreement
from benchmarks.common.stats import summarize
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines.costs import table_of
from benchmarks.gpu.engines.jobs import WORDS, measured_load, warm_up_load
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import Pair, open_pair
from benchmarks.gpu.models.prompts import bench_prompts, max_tokens, prompt_len
from benchmarks.policies.drive import DriveResult
from benchmarks.policies.options import OFF, POLICIES
from benchmarks.policies.report import Round
from benchmarks.policies.stopwatch import Stopwatch
from benchmarks.policies.systems import System
from benchmarks.policies.watch import StepWitness
from benchmarks.policies.workload import Workload
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.errors import FaserError
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.profiling.prompts import PromptSet

# Only overlap: the same drafts as fixed:K, verified while drafting.
OVERLAPPED = {f"fixed:4 {mode}": f"fixed:4,mode={mode}" for mode in ("draft_ahead", "ping_pong")}
PRICE = "price"
NUM_FIXED = 2  # number of the options' fixed lengths in the section "policies"
NUM_ROUNDS = 3
NUM_FIRST_LOADS = 4  # loads that get all their rounds before the others get one
SECONDS_PER_FORM = 60.0
DRY_LOADS = (1, 2)


@dataclass
class Results:
    """A form's rounds, by (load, system) and number.

    shares: share of tokens before the first difference from off, in the last round. seconds: time of the last round.
    """

    names: Sequence[str]
    rounds: dict[tuple[int, str], dict[int, Round]] = field(default_factory=dict)
    shares: dict[tuple[int, str], float] = field(default_factory=dict)
    seconds: dict[tuple[int, str], float] = field(default_factory=dict)

    @property
    def loads(self) -> list[int]:
        return sorted({load for load, _ in self.rounds})

    def rates(self, load: int, name: str) -> list[float]:
        return [r.tokens_per_s for r in self.rounds.get((load, name), {}).values()]

    def ratios(self, load: int, name: str) -> list[float]:
        found, base = self.rounds.get((load, name), {}), self.rounds.get((load, OFF), {})
        return [found[n].tokens_per_s / base[n].tokens_per_s for n in found if n in base]


def run(bench: Bench) -> None:
    fixed = [f"fixed:{k}" for k in bench.options.fixed[:NUM_FIXED]]
    _run(bench, {OFF: OFF} | {name: name for name in fixed} | {PRICE: POLICIES[PRICE]}, overlap=False)


def run_others(bench: Bench) -> None:
    fixed = [f"fixed:{k}" for k in bench.options.fixed[NUM_FIXED:]]
    others = {name: spelling for name, spelling in POLICIES.items() if name not in (PRICE, "price again")}
    _run(bench, {OFF: OFF} | {name: name for name in fixed} | others | OVERLAPPED, overlap=True)


def _run(bench: Bench, spellings: dict[str, str], overlap: bool) -> None:
    for form in bench.forms(SECONDS_PER_FORM):
        bench.record.attempt(form, lambda form=form: _form(bench, form, spellings, overlap))  # type: ignore[misc]


def _form(bench: Bench, form: str, spellings: dict[str, str], overlap: bool) -> None:
    loads = DRY_LOADS if bench.is_dry else bench.options.concurrency
    rows = max(64 if bench.is_dry else 2048, 5 * max(loads))
    longest = prompt_len(bench) + max_tokens(bench) + 16
    limits = PairLimits(max(loads), longest, rows, max(8, *bench.options.fixed))
    prompts, results = bench_prompts(bench), Results(list(spellings))
    with open_pair(bench, form, limits, overlap=overlap) as pair, ExitStack() as stack:
        bench.record.value(f"described {form}", pair.describe())
        table = table_of(bench, pair, prompt_len(bench) + max_tokens(bench) // 2)
        systems = _open(bench, pair, spellings, table, stack)
        for some in (loads[:NUM_FIRST_LOADS], loads[NUM_FIRST_LOADS:]):
            for number in range(NUM_ROUNDS):
                for load in some:
                    _round(bench, systems, prompts, load, number, results)
                    _write(bench, form, results)
    for load in loads:
        missing = [name for name in systems if (load, name) not in results.rounds]
        if missing:
            bench.record.note(f"{form}, {load} request(s) in flight: no time for {', '.join(missing)}")
    if not results.rounds:
        bench.record.error(f"{form}: no time for a single round")


def _open(bench: Bench, pair: Pair, spellings: dict[str, str], table: CostTable, stack: ExitStack) -> dict[str, System]:
    systems = {}
    limits = pair.limits
    for name, spelling in spellings.items():
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


def _round(
    bench: Bench, systems: dict[str, System], prompts: PromptSet, load: int, number: int, results: Results
) -> None:
    """Run every system on the same requests, off first for comparison of tokens; systems without time are left out."""
    work = measured_load(bench, prompts, load, number)
    names = [name for name in systems if name != OFF]
    random.Random(f"{bench.options.seed}/{number}/{load}").shuffle(names)
    reference: DriveResult | None = None
    for name in (OFF, *names):
        found = _measured(bench, systems[name], prompts, work, load, results.seconds)
        if found is None:
            if name == OFF:
                return
            continue
        one, result = found
        reference = reference or result
        results.shares[load, name] = agreement(result.token_ids, reference.token_ids).prefix_share
        results.rounds.setdefault((load, name), {})[number] = one


def _measured(
    bench: Bench,
    system: System,
    prompts: PromptSet,
    work: Workload,
    load: int,
    seconds: dict[tuple[int, str], float],
) -> tuple[Round, DriveResult] | None:
    """Run a system, the first time at this load after a warm-up; None if there is no time."""
    key = (load, system.name)
    begun_s = time.monotonic()
    if key not in seconds:
        if bench.left_s < 0:
            return None
        warm_up = warm_up_load(bench, prompts, load)
        system.run(warm_up)
        seconds[key] = (time.monotonic() - begun_s) * work.num_tokens / warm_up.num_tokens
        begun_s = time.monotonic()
    if bench.left_s < seconds[key]:
        return None
    found = system.run(work)
    seconds[key] = time.monotonic() - begun_s
    return found


def _write(bench: Bench, form: str, results: Results) -> None:
    loads, names = results.loads, results.names

    def cell(load: int, name: str) -> str | None:
        rates, ratios = results.rates(load, name), results.ratios(load, name)
        if not rates:
            return None
        return f"{statistics.median(rates):.0f}" + (f" ({summarize(ratios).words()})" if name != OFF else "")

    bench.record.table(
        f"{form}: output tokens per second (against off), by requests in flight",
        ("system", *map(str, loads)),
        [(name, *(cell(load, name) for load in loads)) for name in names],
        "Median of rounds with different requests after a warm-up; in brackets the median and range of the rounds' "
        f"ratios. Runs include prompts. Empty: no time. {WORDS} The target is a trained one, enlarged without a change "
        "of its outputs: real acceptance, realistic cost.",
    )
    for load in loads:
        bench.record.table(
            f"{form}, {load} request(s) in flight",
            ("system", "rounds", "TTFT ms", "ms per token", "accepted", "drafts", "pruned", "of oracle", "as off"),
            [
                _details(name, list(results.rounds[load, name].values()), results.shares[load, name])
                for name in names
                if (load, name) in results.rounds
            ],
            "as off: share of the tokens before the first that differs from off's (see the section exactness). of "
            "oracle: against an oracle's choice of the same drafts.",
        )
    medians = {
        name: {float(load): statistics.median(ratios) for load in loads if (ratios := results.ratios(load, name))}
        for name in names
    }
    bench.record.plot(f"{form}: against off", "requests in flight", "tokens per second / off", medians)
    rounds = [
        {"concurrency": load, "system": name, "rounds": {number: asdict(one) for number, one in found.items()}}
        for (load, name), found in results.rounds.items()
    ]
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
