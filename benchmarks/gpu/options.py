"""Options of `faser bench gpu`, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from faser_trtllm.errors import InvalidArgumentError

# Target shape -> draft shape (benchmarks/gpu/models/enlarge.py), about a twentieth of the target's matrices.
DRAFT_OF = {"1B": "0.1B", "8B": "0.3B", "8B-128k": "0.3B-128k", "32B": "1B"}
# The first has a real model's vocabulary, whose LM head, rejection sampling and draws are a good part of a step.
FORMS = ("8B-128k", "8B", "1B", "32B")
CONCURRENCY = (16, 64, 1, 256, 4, 128, 8, 32, 2)


@dataclass(frozen=True)
class GpuBenchOptions:
    """Options of `faser bench gpu`.

    checkpoint_dir, draft_checkpoint_dir: a trained pair (engines/demo, or one made by engines/train_gpu_pair.py), which
        sections enlarge to their shapes.
    sections: names, run in the suite's order; (): those that fit into the minutes.
    dry_run: tiny shapes on the CPU, to check that everything runs; the numbers are meaningless.
    """

    checkpoint_dir: Path
    draft_checkpoint_dir: Path
    output_dir: Path
    sections: tuple[str, ...] = ()
    minutes: float = 25.0
    forms: tuple[str, ...] = FORMS
    concurrency: tuple[int, ...] = CONCURRENCY
    fixed: tuple[int, ...] = (2, 4, 6, 8)
    prompt_len: int = 128
    max_tokens: int = 96
    dry_run: bool = False
    seed: int = 0
    command_line: tuple[str, ...] = ()

    def validate(self) -> None:
        for name in ("forms", "concurrency", "fixed"):
            if not getattr(self, name):
                raise InvalidArgumentError(f"{name} is empty, give at least one")
        for form in self.forms:
            if form not in DRAFT_OF:
                raise InvalidArgumentError(f"form {form} is unknown, there are {', '.join(DRAFT_OF)}")
        for name in ("concurrency", "fixed"):
            for value in getattr(self, name):
                if value < 1:
                    raise InvalidArgumentError(f"{name} has {value}; it must be 1 or more")
        for name in ("prompt_len", "max_tokens"):
            if getattr(self, name) < 2:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; it must be 2 or more")
        if not self.minutes > 0:
            raise InvalidArgumentError(f"minutes is {self.minutes}; it must be more than 0")

    def to_json(self) -> str:
        return json.dumps({name: str(v) if isinstance(v, Path) else v for name, v in asdict(self).items()})

    @staticmethod
    def from_json(text: str) -> GpuBenchOptions:
        return GpuBenchOptions.from_dict(json.loads(text))

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> GpuBenchOptions:
        values: dict[str, Any] = {}
        for field in fields(GpuBenchOptions):
            value = data[field.name]
            if field.name.endswith("_dir"):
                value = Path(value)
            values[field.name] = tuple(value) if isinstance(value, list) else value
        return GpuBenchOptions(**values)
