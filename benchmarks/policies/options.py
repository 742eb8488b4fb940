"""Options of `faser bench policies`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.policies.workload import JOBS_PER_STREAM
from faser_trtllm.errors import InvalidArgumentError

OFF = "off"
SLICE_S = 0.02  # duration of a system's turn
# Label in reports -> spelling of the policy, in the order of the ablation.
POLICIES = {
    "schedule": "schedule",
    "gp_lcb": "gp_lcb",
    "price": "price:mode=serial,prune=off",
    "price again": "price:mode=serial,prune=off",  # a control, whose difference is noise
    "price+pruning": "price:mode=serial,prune=auto",
    "price+pruning+overlap": "price:mode=auto,prune=auto",
}


@dataclass(frozen=True)
class PolicyBenchOptions:
    """Options of `faser bench policies`.

    expand: forms of the target, as multiples of its layers (same function, higher cost).
    minutes: time of measurement for all forms, with at least one round after a warm-up. Building and profiling take
        about a minute per form in addition.
    num_fixed_kept: number of fixed lengths in measured rounds, the fastest ones of a workload's warm-up.
    jobs_per_stream: requests per concurrent stream of a closed loop, at least min_jobs in all.
    swing: highest over lowest arrival rate. peak_load: highest arrival rate over the capacity of `off`.
    simulated: times of passes come from the cost table (lab/simulation), so that runs are reproducible.
    cost_table: the profile.json of a machine to simulate; default: measured here.
    slowdown: the simulated machine is up to this much slower for stretches of 0.2 to 3 s; rates use its best speed.
    engines_dir: keeps engine directories for reuse; default: a temporary folder.
    """

    checkpoint_dir: Path
    draft_checkpoint_dir: Path
    output_dir: Path
    expand: tuple[int, ...] = (1, 4)
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    bursty: bool = True
    fixed: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    num_fixed_kept: int = 3
    policies: tuple[str, ...] = tuple(POLICIES)
    minutes: float = 20.0
    max_rounds: int = 7
    prompt_len: int = 64
    min_tokens: int = 32
    max_tokens: int = 160
    jobs_per_stream: int = JOBS_PER_STREAM
    min_jobs: int = 32
    num_bursty_jobs: int = 160
    swing: float = 35.0
    peak_load: float = 2.5
    temperature: float = 0.8
    simulated: bool = False
    cost_table: Path | None = None
    slowdown: float = 1.0
    sampled_share: float = 0.5
    engines_dir: Path | None = None
    cores: tuple[int, ...] | None = None
    num_threads: int | None = None
    seed: int = 0
    command_line: tuple[str, ...] = ()

    def quick(self) -> PolicyBenchOptions:
        """Return options for a run of about a minute, not to be quoted."""
        return replace(
            self,
            expand=self.expand[-1:],
            concurrency=tuple(c for c in (1, 8) if c in self.concurrency) or self.concurrency[:1],
            fixed=tuple(k for k in self.fixed if k in (2, 4)) or self.fixed[:1],
            minutes=min(self.minutes, 1.0),
            max_rounds=1,
            max_tokens=max(self.min_tokens, min(self.max_tokens, 64)),
            min_jobs=6,
            num_bursty_jobs=32,
        )

    def systems(self) -> dict[str, str]:
        """Return spellings of all systems by label."""
        fixed = {f"fixed:{k}": f"fixed:{k}" for k in self.fixed}
        return {OFF: OFF} | fixed | {name: POLICIES[name] for name in self.policies}

    def pinned_cores(self) -> tuple[int, ...]:
        return self.cores if self.cores is not None else tuple(sorted(os.sched_getaffinity(0)))

    def threads(self) -> int:
        return self.num_threads if self.num_threads is not None else len(self.pinned_cores())

    @property
    def max_batch_size(self) -> int:
        return max(*self.concurrency, 32) if self.bursty else max(self.concurrency)

    def validate(self) -> None:
        for name in ("expand", "concurrency"):
            if not getattr(self, name):
                raise InvalidArgumentError(f"{name} is empty, give at least one")
        for name in ("expand", "concurrency", "fixed"):
            for value in getattr(self, name):
                _at_least(name, value, 1)
        for name in ("prompt_len", "min_tokens", "max_rounds", "jobs_per_stream", "min_jobs", "num_bursty_jobs"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_tokens", self.max_tokens, self.min_tokens)
        for policy in self.policies:
            if policy not in POLICIES:
                raise InvalidArgumentError(f"policy {policy} is unknown, there are {', '.join(POLICIES)}")
        if not self.minutes > 0:
            raise InvalidArgumentError(f"minutes is {self.minutes}; it must be more than 0")
        if self.cost_table is not None and not self.simulated:
            raise InvalidArgumentError("cost_table is given, but a run that is not simulated measures; add --simulated")
        if not self.slowdown >= 1:
            raise InvalidArgumentError(f"slowdown is {self.slowdown}; it must be 1 or more")
        if self.slowdown > 1 and not self.simulated:
            raise InvalidArgumentError("slowdown is given, but it is for simulated machines only; add --simulated")
        if not self.swing >= 1:
            raise InvalidArgumentError(f"swing is {self.swing}; it must be 1 or more")


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise InvalidArgumentError(f"{name} is {value}; it must be {low} or more")
