"""The pass conditions of a soak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.soak.growth import Growth, Trend
from benchmarks.soak.ledger import Ending, Ledger
from benchmarks.soak.options import SoakOptions
from benchmarks.soak.service import RESTARTS, is_idle
from benchmarks.soak.watch import ENGINE, LAUNCHER, SERVER, Sample

# gRPC and Python start pool threads, with descriptors, on first use, which is no leak; a leak per request, connection
# or kill would be far larger.
POOL_SLACK = 2


@dataclass(frozen=True)
class Condition:
    """A condition; found and bound are texts."""

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
    trends: Sequence[Trend] = (),
    lives: Mapping[str, int] = MappingProxyType({}),
    log_mib_per_hour: float = 0.0,
) -> list[Condition]:
    """Return all conditions; the run passes if all are met. lives: number of processes seen of each role."""
    conditions = [*_accounting(warmup, ledger), *_recovery(options, ledger), _blocks(end)]
    if ledger.kills:
        conditions.append(_restarts(ledger, baseline, end))
    conditions += _lives(ledger, lives)
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
    conditions += [
        Condition(
            f"memory of {trend.role} has no slope in the calm",
            trend.mib_per_hour <= options.max_slope_mib_per_hour,
            f"{trend.mib_per_hour:+.2f} MiB/h, standard error {trend.error:.2f}, over {trend.minutes:.0f} minutes",
            f"at most {options.max_slope_mib_per_hour:+.2f} MiB/h",
        )
        for trend in trends
    ]
    if options.is_own_service:
        limit = options.max_log_mib_per_hour
        found = f"{log_mib_per_hour:.3f} MiB/h"
        conditions.append(Condition("the log is short", log_mib_per_hour <= limit, found, f"at most {limit:g} MiB/h"))
    if options.is_own_service:
        conditions.append(
            Condition("nothing is left over", not leftovers, "; ".join(leftovers) or "nothing", "nothing, status 0")
        )
    return conditions


def are_counts_back(before: Sample, after: Sample) -> bool:
    """Return True if processes, descriptors and threads are as before."""
    return all(condition.is_met for condition in _counts(before, after))


def _accounting(warmup: Ledger, ledger: Ledger) -> list[Condition]:
    failed = warmup.total(Ending.FAILED) + ledger.total(Ending.FAILED)
    finished, total = ledger.total(Ending.FINISHED), warmup.total() + ledger.total()
    return [
        Condition("every request ended as it may, warm-up included", not failed, f"{failed} of {total}", "0 failed"),
        Condition("requests finished with their text", finished > 0, str(finished), "at least 1"),
    ]


def _recovery(options: SoakOptions, ledger: Ledger) -> list[Condition]:
    bounds = {ENGINE: options.max_recovery_s, SERVER: options.max_server_recovery_s}
    roles = dict.fromkeys(kill.role for kill in ledger.kills)
    return [
        _recovery_of(role, [kill.recovery_s for kill in ledger.kills if kill.role == role], bounds[role])
        for role in roles
    ]


def _recovery_of(role: str, times: Sequence[float | None], bound_s: float) -> Condition:
    known = [time for time in times if time is not None]
    worst = f"{max(known):.2f} s at worst" if known else "never"
    missing = len(times) - len(known)
    return Condition(
        f"service after each kill of the {role}",
        not missing and max(known) <= bound_s,
        worst + (f", {missing} of {len(times)} without recovery" if missing else f" of {len(times)}"),
        f"within {bound_s:g} s",
    )


def _restarts(ledger: Ledger, baseline: Resting, end: Resting) -> Condition:
    """Check that the metrics count the restarts; a new server counts from 0."""
    roles = [kill.role for kill in ledger.kills]
    first = len(roles) - roles[::-1].index(SERVER) if SERVER in roles else 0
    before = 0.0 if first else baseline.gauges.get(RESTARTS, 0.0)
    found, wanted = end.gauges.get(RESTARTS, 0.0) - before, len(roles) - first
    return Condition("the metrics count the restarts", found == wanted, f"{found:.0f}", f"{wanted} kills")


def _lives(ledger: Ledger, lives: Mapping[str, int]) -> list[Condition]:
    """Check that only our kills ended a process. One that lives shorter than the watch's period may be missed."""
    server = sum(kill.role == SERVER for kill in ledger.kills)
    wanted = {ENGINE: 1 + len(ledger.kills), SERVER: 1 + server}
    return [
        Condition(f"no healthy {role} was ended", lives[role] <= number, f"{lives[role]} lived", f"at most {number}")
        for role, number in wanted.items()
        if role in lives
    ]


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
