"""The pass conditions of a soak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.soak.growth import Growth
from benchmarks.soak.ledger import Ending, Ledger
from benchmarks.soak.options import SoakOptions
from benchmarks.soak.service import RESTARTS, is_idle
from benchmarks.soak.watch import LAUNCHER, Sample

# gRPC and Python start pool threads, with descriptors, on first use: late ones are not a leak, whereas a leak per
# request, connection or kill would be far larger.
POOL_SLACK = 2


@dataclass(frozen=True)
class Condition:
    """found and bound are text."""

    name: str
    is_met: bool
    found: str
    bound: str


@dataclass(frozen=True)
class Resting:
    """An idle service, after the warm-up or after the load. sample: None if its processes are not visible to us."""

    gauges: dict[str, float]
    sample: Sample | None


def judge_run(
    options: SoakOptions,
    warmup: Ledger,
    ledger: Ledger,
    baseline: Resting,
    end: Resting,
    growths: Sequence[Growth],
    leftovers: Sequence[str],
) -> list[Condition]:
    """All conditions; the run passes if all are met."""
    conditions = [*_accounting(warmup, ledger), *_recovery(options, ledger), _blocks(end)]
    if ledger.kills:
        conditions.append(_restarts(ledger, baseline, end))
    if baseline.sample is not None and end.sample is not None:
        conditions += _counts(baseline.sample, end.sample)
    conditions += [
        Condition(
            f"memory of {growth.role} is flat",
            growth.mib <= options.max_growth_mib,
            f"{growth.mib:+.1f} MiB by slope, {growth.first_mib:.0f} to {growth.last_mib:.0f} MiB",
            f"at most {options.max_growth_mib:+.1f} MiB",
        )
        for growth in growths
    ]
    if options.is_own_service:
        conditions.append(
            Condition("nothing is left behind", not leftovers, "; ".join(leftovers) or "nothing", "nothing, status 0")
        )
    return conditions


def are_counts_back(before: Sample, after: Sample) -> bool:
    """Processes, descriptors and threads are as before."""
    return all(condition.is_met for condition in _counts(before, after))


def _accounting(warmup: Ledger, ledger: Ledger) -> list[Condition]:
    failed = warmup.total(Ending.FAILED) + ledger.total(Ending.FAILED)
    finished, total = ledger.total(Ending.FINISHED), warmup.total() + ledger.total()
    return [
        Condition("every request ended as it may, warm-up included", not failed, f"{failed} of {total}", "0 failed"),
        Condition("requests finished with their text", finished > 0, str(finished), "at least 1"),
    ]


def _recovery(options: SoakOptions, ledger: Ledger) -> list[Condition]:
    times = [kill.recovery_s for kill in ledger.kills]
    if not times:
        return []
    known = [time for time in times if time is not None]
    worst = f"{max(known):.2f} s at worst" if known else "never"
    missing = len(times) - len(known)
    return [
        Condition(
            "service after each kill",
            not missing and max(known) <= options.max_recovery_s,
            worst + (f", {missing} of {len(times)} without recovery" if missing else f" of {len(times)}"),
            f"within {options.max_recovery_s:g} s",
        )
    ]


def _restarts(ledger: Ledger, baseline: Resting, end: Resting) -> Condition:
    found = end.gauges.get(RESTARTS, 0.0) - baseline.gauges.get(RESTARTS, 0.0)
    return Condition(
        "the metrics count the restarts", found == len(ledger.kills), f"{found:.0f}", f"{len(ledger.kills)} kills"
    )


def _blocks(end: Resting) -> Condition:
    found = ", ".join(f"{name} {value:.0f}" for name, value in end.gauges.items()) or "the service does not tell"
    return Condition("no request and no KV block is held", is_idle(end.gauges), found, "all KV blocks free")


def _counts(before: Sample, after: Sample) -> list[Condition]:
    conditions = [
        Condition(
            "the same processes are there",
            before.processes.keys() == after.processes.keys(),
            ", ".join(sorted(after.processes)),
            ", ".join(sorted(before.processes)),
        ),
    ]
    for role in sorted(before.processes.keys() & after.processes.keys()):
        old, new = before.processes[role], after.processes[role]
        slack = 0 if role == LAUNCHER else POOL_SLACK
        conditions.append(
            Condition(
                f"descriptors and threads of {role}",
                new.num_fds <= old.num_fds + slack and new.num_threads <= old.num_threads + slack,
                f"{new.num_fds} and {new.num_threads}",
                f"{old.num_fds} and {old.num_threads}" + (f", +{slack} for late pool threads" if slack else ""),
            )
        )
    return conditions
