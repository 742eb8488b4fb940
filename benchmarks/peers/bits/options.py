"""Options of the comparison at equal bits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.bits.models import BITS
from faser_trtllm.errors import InvalidArgumentError

PEERS = ("llama.cpp", "openvino")


@dataclass(frozen=True)
class BitsOptions:
    """Options of the comparison.

    rows: sequences decoded at the same time, after prompt_len tokens each. prefill: tokens of the one long prompt.
    steps: decode steps of a case, whose median counts.
    llama_python, openvino_python: interpreters of the peers; None: the one that runs the bench.
    activation_bits: 16 or 8, of our engine with integer weights.
    files_dir: keeps engines and GGUF files of one model for reuse.
    """

    output_dir: Path
    checkpoint_dir: Path | None = None
    random: bool = True
    bits: tuple[str, ...] = tuple(BITS)
    rows: tuple[int, ...] = (1, 4, 8, 16, 64)
    prompt_len: int = 16
    prefill: int = 512
    steps: int = 12
    rounds: int = 5
    peers: tuple[str, ...] = PEERS
    llama_python: Path | None = None
    openvino_python: Path | None = None
    num_threads: int | None = None
    activation_bits: int = 16
    files_dir: Path | None = None
    timeout_s: float = 600.0
    command_line: tuple[str, ...] = ()

    @property
    def max_seq_len(self) -> int:
        return -(-(max(self.prompt_len, self.prefill) + self.steps + 16) // 64) * 64

    @property
    def max_rows(self) -> int:
        return max(self.prefill, max(self.rows) * self.prompt_len)

    def threads(self) -> int:
        return self.num_threads or len(os.sched_getaffinity(0))

    def pinned_cores(self) -> tuple[int, ...]:
        return tuple(sorted(os.sched_getaffinity(0)))[-self.threads() :]

    def validate(self) -> None:
        """Raise InvalidArgumentError for options that are unknown or empty."""
        for name, known in (("bits", tuple(BITS)), ("peers", PEERS)):
            for value in getattr(self, name):
                if value not in known:
                    raise InvalidArgumentError(f"{name} has {value}, there are {', '.join(known)}")
        if not self.bits or not self.rows:
            raise InvalidArgumentError("bits or rows is empty, give at least one")
        if self.checkpoint_dir is None and not self.random:
            raise InvalidArgumentError("there is no model: give checkpoint_dir, or do not skip the random one")
        if self.files_dir is not None and self.checkpoint_dir is not None and self.random:
            raise InvalidArgumentError("files_dir is for one model, but there are two: add --no_random")
        if self.num_threads is not None and not 1 <= self.num_threads <= len(os.sched_getaffinity(0)):
            raise InvalidArgumentError(
                f"num_threads is {self.num_threads}, this process may use {len(os.sched_getaffinity(0))} cores"
            )
