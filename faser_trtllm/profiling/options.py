"""Define and check the options of `faser profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from faser_trtllm.errors import InvalidArgumentError


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `faser profile`.

    quick: run fewer points and rounds, and do not calibrate pruning.
    overlap: measure both partitions, and every point of the grid, in a quick profile, too.
    time_budget_s: time for rounds; 3 to 25 rounds run.
    prompt_file: prompts for the calibration, one per line; default: held-out standard library sources.
    calibrate: calibrate pruning if the target has exit layers.
    cores, num_threads: as in ExecutorConfig; a profile is valid only for these.
    """

    engine_dir: Path
    quick: bool = False
    overlap: bool = False
    time_budget_s: float = 40.0
    prompt_file: Path | None = None
    num_prompts: int = 48
    prompt_len: int = 64
    max_tokens: int = 96
    calibrate: bool = True
    cores: tuple[int, ...] | None = None
    num_threads: int | None = None
    seed: int = 0

    def validate(self) -> None:
        for name in ("num_prompts", "prompt_len", "max_tokens"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not self.time_budget_s > 0:
            raise InvalidArgumentError(f"time_budget_s is {self.time_budget_s}; it must be more than 0 seconds")
