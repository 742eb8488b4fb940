"""Options of a bench run against peers."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from faser_trtllm.errors import InvalidArgumentError

PEERS = ("transformers", "llama.cpp", "openvino")


@dataclass(frozen=True)
class BenchOptions:
    """Options of `faser bench peers`.

    expand: forms of the target, as multiples of its layers (same function, higher cost).
    num_prompts: prompts per round, the same for every case; a multiple of every batch size.
    rounds: measured rounds; every case runs once per round, after a warm-up round.
    assisted_draft_lens: draft lengths of transformers' and OpenVINO's assisted generation (batch size 1 only).
    step_rows: rows of the one-step latency comparison with llama.cpp; empty leaves it out.
    transformers_python, llama_python, openvino_python: interpreters of the peers; None: the one that runs the bench.
    cores: cores of every system; None: all that this process may use.
    """

    checkpoint_dir: Path
    draft_checkpoint_dir: Path
    output_dir: Path
    expand: tuple[int, ...] = (1, 4)
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    speculation: tuple[str, ...] = ("off", *(f"fixed:{k}" for k in range(1, 9)))
    prompt_len: int = 64
    max_tokens: int = 128
    num_prompts: int = 8
    rounds: int = 5
    peers: tuple[str, ...] = PEERS
    assisted_draft_lens: tuple[int, ...] = (2, 4, 8)
    llamacpp_dtypes: tuple[str, ...] = ("bf16", "q8_0")
    step_rows: tuple[int, ...] = (1, 4, 16, 64)
    transformers_python: Path | None = None
    llama_python: Path | None = None
    openvino_python: Path | None = None
    cores: tuple[int, ...] | None = None
    num_threads: int | None = None
    seed: int = 0
    timeout_s: float = 900.0
    command_line: tuple[str, ...] = ()

    def quick(self) -> BenchOptions:
        """Return options for a run of about a minute with the same systems, not to be quoted."""
        return replace(
            self,
            expand=self.expand[-1:],
            batch_sizes=tuple(size for size in (1, 4) if size in self.batch_sizes) or self.batch_sizes[:1],
            speculation=("off", "fixed:2", "fixed:4"),
            max_tokens=min(self.max_tokens, 48),
            num_prompts=4,
            rounds=3,
            assisted_draft_lens=self.assisted_draft_lens[:1],
            step_rows=self.step_rows and (1, 16),
        )

    def pinned_cores(self) -> tuple[int, ...]:
        return self.cores if self.cores is not None else tuple(sorted(os.sched_getaffinity(0)))

    def threads(self) -> int:
        return self.num_threads if self.num_threads is not None else len(self.pinned_cores())

    def validate(self) -> None:
        """Raise InvalidArgumentError for a run that cannot work or would be meaningless."""
        for name in ("expand", "batch_sizes", "speculation"):
            if not getattr(self, name):
                raise InvalidArgumentError(f"{name} is empty, give at least one")
        for name in ("expand", "batch_sizes", "assisted_draft_lens", "step_rows"):
            for value in getattr(self, name):
                _at_least(name, value, 1)
        for name in ("prompt_len", "max_tokens", "num_prompts", "rounds", "num_threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.speculation[0] != "off":
            raise InvalidArgumentError(
                f"speculation starts with {self.speculation[0]}; it must start with off, the baseline of all ratios"
            )
        for size in self.batch_sizes:
            if self.num_prompts % size:
                raise InvalidArgumentError(
                    f"num_prompts is {self.num_prompts}; it must be a multiple of batch size {size}, "
                    "so that every case runs the same prompts"
                )
        for peer in self.peers:
            if peer not in PEERS:
                raise InvalidArgumentError(f"peer {peer} is unknown, there are {', '.join(PEERS)}")
        for dtype in self.llamacpp_dtypes:
            if dtype not in ("bf16", "q8_0"):
                raise InvalidArgumentError(f"llamacpp_dtypes holds {dtype}, there are bf16 and q8_0")
        missing = set(self.pinned_cores()) - os.sched_getaffinity(0)
        if missing:
            raise InvalidArgumentError(
                f"core {min(missing)} is not one that this process may use, there are {sorted(os.sched_getaffinity(0))}"
            )


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise InvalidArgumentError(f"{name} is {value}; it must be {low} or more")
