"""Options of `faser bench serve`, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serve.dataset import DATASETS, MAX_OUTPUT_LEN
from faser_trtllm.errors import InvalidArgumentError

BACKENDS = ("openai", "openai-chat")
GOODPUT = ("ttft", "tpot", "e2el")
MAX_PROMPTS = 1_000_000
OWN_FIELDS = ("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class ServeBenchOptions:
    """Options of `faser bench serve`, with the names of `vllm bench serve` and the help in __main__.py.

    If num_prompts exceeds the dataset, it is repeated. goodput: limits in ms by name.
    """

    dataset: str
    dataset_path: Path
    base_url: str = "http://127.0.0.1:9000"
    model: str | None = None
    backend: str | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_prompts: int | None = None
    num_warmups: int = 0
    category: str | None = None
    max_turns: int | None = None
    output_len: int = 256
    tokenizer: Path | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: dict[str, Any] | None = None
    goodput: tuple[tuple[str, float], ...] = ()
    disable_shuffle: bool = False
    timeout_s: float = 600.0
    seed: int = 0
    output_dir: Path | None = None
    command_line: tuple[str, ...] = ()

    def validate(self) -> None:
        """Raise InvalidArgumentError for a run that cannot work or would be meaningless."""
        if self.dataset not in DATASETS:
            raise InvalidArgumentError(f"dataset is {self.dataset!r}; it must be one of {', '.join(DATASETS)}")
        if self.backend is not None and self.backend not in BACKENDS:
            raise InvalidArgumentError(f"backend is {self.backend!r}; it must be {' or '.join(BACKENDS)}")
        if not self.base_url.startswith(("http://", "https://")):
            raise InvalidArgumentError(f"base_url is {self.base_url!r}; it must begin with http:// or https://")
        for name in ("max_concurrency", "num_prompts", "max_turns", "output_len"):
            limit = MAX_OUTPUT_LEN if name == "output_len" else MAX_PROMPTS
            value = getattr(self, name)
            if value is not None and not 1 <= value <= limit:
                raise InvalidArgumentError(f"{name} is {value}, allowed is 1 to {limit}")
        if not 0 <= self.num_warmups <= MAX_PROMPTS:
            raise InvalidArgumentError(f"num_warmups is {self.num_warmups}, allowed is 0 to {MAX_PROMPTS}")
        if not self.request_rate > 0.0:
            raise InvalidArgumentError(f"request_rate is {self.request_rate:g}; it must be more than 0, or inf")
        for name in ("burstiness", "timeout_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InvalidArgumentError(f"{name} is {getattr(self, name):g}; it must be more than 0")
        if not 0.0 <= self.temperature < math.inf:
            raise InvalidArgumentError(f"temperature is {self.temperature:g}; it must be 0 or more")
        for name, bound in self.goodput:
            if name not in GOODPUT or not 0.0 < bound < math.inf:
                raise InvalidArgumentError(f"goodput has {name}:{bound:g}; it must be {', '.join(GOODPUT)} and ms")
        if fixed := [name for name in OWN_FIELDS if name in (self.extra_body or ())]:
            raise InvalidArgumentError(f"extra_body has {fixed[0]}, which the bench sets; leave it out")
        if self.tokenizer is not None and self.dataset != "sharegpt":
            raise InvalidArgumentError("tokenizer is for the dataset sharegpt; leave it out, or set output_len")

    @property
    def api(self) -> str:
        return self.backend or ("openai" if self.dataset == "humaneval" else "openai-chat")
