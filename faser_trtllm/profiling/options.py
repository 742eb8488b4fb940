"""Options of `faser profile`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from faser_trtllm.errors import InvalidArgumentError


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `faser profile`.

    quick: fewer points and rounds, and no calibration of pruning.
    overlap: measure both partitions and held-out points in a quick profile, too.
    time_budget_s: time for interleaved rounds, of which 3 to 25 are run.
    prompt_file: one prompt per line for the calibration of pruning; default: held-out standard library sources.
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
