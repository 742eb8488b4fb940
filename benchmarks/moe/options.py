"""The options of `faser bench moe`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.moe.model import MoeSizes
from faser_trtllm.errors import InvalidArgumentError

MAX_DRAFT_LEN = 8
BATCH_SIZES = (1, 4, 16)
OFF, PRICE, BY_ROWS = "off", "price", "price by rows"
PRICE_SPELLING = "price:mode=serial,prune=off"


@dataclass(frozen=True)
class MoeBenchOptions:
    """Options of `faser bench moe`.

    models_dir: keeps checkpoints, engines and profiles for reuse; default: a temporary folder.
    embedding_scales: one model each; larger scales route neighboring rows less alike, which is measured.
    acceptance: probabilities that a draft is accepted if those before it were.
    num_fixed_kept: number of fixed lengths that go on after a cell's first block, the fastest ones.
    seconds: time of a cell for all systems together. blocks: blocks of a cell after a warm-up; ratios are per block.
    learning_s: time that each system with `price` runs alone at the start of a cell, in addition.
    quick_profile: use the quick profile of a build, without held-out points. sizes: sizes of the target.
    """

    output_dir: Path
    models_dir: Path | None = None
    embedding_scales: tuple[float, ...] = (1.0, 0.35)
    acceptance: tuple[float, ...] = (0.5, 0.7, 0.9)
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    fixed: tuple[int, ...] = tuple(range(1, MAX_DRAFT_LEN + 1))
    num_fixed_kept: int = 3
    seconds: float = 25.0
    learning_s: float = 10.0
    blocks: int = 5
    slice_ms: float = 40.0
    profile_s: float = 40.0
    quick_profile: bool = False
    prompt_len: int = 16
    max_tokens: int = 192
    quantization: str = "W8A8"
    sizes: MoeSizes = field(default_factory=MoeSizes)
    cores: tuple[int, ...] | None = None
    num_threads: int | None = None
    seed: int = 0
    command_line: tuple[str, ...] = ()

    def quick(self) -> MoeBenchOptions:
        """Return options with a tiny model, not to be quoted."""
        return replace(
            self,
            embedding_scales=self.embedding_scales[:1],
            acceptance=self.acceptance[:1],
            batch_sizes=self.batch_sizes[:2],
            fixed=tuple(k for k in self.fixed if k in (2, 4)) or self.fixed[:1],
            seconds=min(self.seconds, 2.0),
            learning_s=min(self.learning_s, 0.2),
            blocks=min(self.blocks, 2),
            profile_s=min(self.profile_s, 1.0),
            sizes=MoeSizes(num_layers=2, hidden_size=128, num_experts=16, top_k=2, expert_size=128),
        )

    def systems(self) -> dict[str, str]:
        """Return the spellings of policies by label."""
        fixed = {f"fixed:{k}": f"fixed:{k}" for k in self.fixed}
        return {OFF: OFF} | fixed | {PRICE: PRICE_SPELLING, BY_ROWS: PRICE_SPELLING}

    def pinned_cores(self) -> tuple[int, ...]:
        return self.cores if self.cores is not None else tuple(sorted(os.sched_getaffinity(0)))

    def threads(self) -> int:
        return self.num_threads if self.num_threads is not None else len(self.pinned_cores())

    @property
    def max_batch_size(self) -> int:
        """The engines' batch size, which runs of fewer requests share."""
        return max(BATCH_SIZES + self.batch_sizes)

    @property
    def max_seq_len(self) -> int:
        """A multiple of 64 with room for a bonus token and drafts."""
        return -(-(self.prompt_len + self.max_tokens + MAX_DRAFT_LEN + 2) // 64) * 64

    def validate(self) -> None:
        """Raise InvalidArgumentError for options that are empty or out of range."""
        for name in ("embedding_scales", "acceptance", "batch_sizes", "fixed"):
            if not getattr(self, name):
                raise InvalidArgumentError(f"{name} is empty, give at least one")
        for value in self.acceptance:
            if not 0.0 <= value <= 1.0:
                raise InvalidArgumentError(f"acceptance has {value}; it must be between 0 and 1")
        for value in self.fixed:
            if not 1 <= value <= MAX_DRAFT_LEN:
                raise InvalidArgumentError(f"fixed has {value}; it must be between 1 and {MAX_DRAFT_LEN}")
        for value in self.embedding_scales:
            if not value > 0:
                raise InvalidArgumentError(f"embedding_scales has {value}; it must be more than 0")
        for name, low in (("num_fixed_kept", 1), ("blocks", 2), ("prompt_len", 1), ("max_tokens", 2)):
            if getattr(self, name) < low:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; it must be {low} or more")
        if min(self.batch_sizes) < 1:
            raise InvalidArgumentError(f"batch_sizes has {min(self.batch_sizes)}; it must be 1 or more")
        for name in ("seconds", "slice_ms", "profile_s", "learning_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; it must be more than 0")
