"""Options of `faser bench host`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from faser_trtllm.config import DrafterName
from faser_trtllm.errors import ConfigError, InvalidArgumentError, install

MAX_REQUESTS = 4096
REFERENCE_DRAFTS = 4  # drafts per step of the loop in C
ENGINES = NULL, GPU = "null", "gpu"
"""null: null_engines.py. gpu: the engines of engine/gpu on a device that computes nothing."""


def split_system(system: str) -> tuple[str, tuple[DrafterName, ...]]:
    """Split "speculation" or "speculation/drafters", such as fixed:4/suffix+model, into policy and drafters."""
    speculation, _, names = system.partition("/")
    try:
        return speculation, tuple(DrafterName(name) for name in (names or DrafterName.MODEL.value).split("+"))
    except ValueError:
        known = ", ".join(DrafterName)
        raise InvalidArgumentError(f"policies has {system!r}, the drafters after / must be of {known}") from None


@dataclass(frozen=True)
class HostBenchOptions:
    """Options of the bench. num_requests: batch sizes. systems: spellings of split_system. engines: one of ENGINES.

    num_steps: timed steps of each system and size in each round.
    """

    output_dir: Path
    num_requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    systems: tuple[str, ...] = ("off", "fixed:4", "price")
    num_rounds: int = 5
    num_steps: int = 64
    acceptance: float = 0.7
    max_draft_len: int = 8
    engines: str = NULL
    command_line: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise InvalidArgumentError for options that cannot be measured."""
        if not self.num_requests or not all(1 <= n <= MAX_REQUESTS for n in self.num_requests):
            raise InvalidArgumentError(
                f"requests is {','.join(map(str, self.num_requests))!r}; it must be numbers of 1 to {MAX_REQUESTS}"
            )
        for name, value in (("rounds", self.num_rounds), ("steps", self.num_steps)):
            if value < 1:
                raise InvalidArgumentError(f"{name} is {value}; it must be 1 or more")
        if not self.systems:
            raise InvalidArgumentError("policies is empty, name at least one, for instance off")
        for system in self.systems:
            split_system(system)
        if self.engines not in ENGINES:
            raise InvalidArgumentError(f"engines is {self.engines!r}; it must be one of {', '.join(ENGINES)}")
        if self.engines == GPU and find_spec("torch") is None:
            raise ConfigError(f"engines is {GPU!r}, which needs torch; {install('bench')}")

    def quick(self) -> HostBenchOptions:
        return replace(self, num_requests=(1, 32, 256), num_rounds=2, num_steps=32)
