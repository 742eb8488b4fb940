"""Define and check the options of `faser profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from faser_trtllm.errors import InvalidArgumentError

MAX_TOKENS = 96


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `faser profile`.

    quick: run fewer points and rounds, and do not calibrate pruning.
    overlap: measure both partitions, and every point of the grid, in a quick profile, too.
    time_budget_s: time for rounds; 3 to 25 rounds run.
    max_tokens: tokens per prompt of the calibration; None: MAX_TOKENS, or less if the engines allow less.
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
    max_tokens: int | None = None
    calibrate: bool = True
    cores: tuple[int, ...] | None = None
    num_threads: int | None = None
    seed: int = 0

    def num_tokens(self, max_seq_len: int) -> int:
        """Return max_tokens for engines that allow max_seq_len tokens with the prompt."""
        return min(MAX_TOKENS, max_seq_len // 2) if self.max_tokens is None else self.max_tokens

    def validate(self) -> None:
        for name in ("num_prompts", "prompt_len", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{name} is {value}; it must be 1 or more")
        if not self.time_budget_s > 0:
            raise InvalidArgumentError(f"time_budget_s is {self.time_budget_s}; it must be more than 0 seconds")
