"""Options of `faser bench serve`, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from faser_trtllm.errors import InvalidArgumentError

ARRIVALS = ("poisson", "gamma", "bursts", "trace")
REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Objectives:
    """Latency bounds of goodput in ms; None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def any_given(self) -> bool:
        return any(bound is not None for bound in (self.ttft_ms, self.tpot_ms, self.e2e_ms))


@dataclass(frozen=True)
class ServeBenchOptions:
    """Options of `faser bench serve`.

    url: gRPC address of a running service; None starts one over engine_dir and stops it afterwards.
    arrivals: one of ARRIVALS. trace: the file for "trace". burstiness: for "gamma". peak_ratio, period_s: for "bursts".
    request_rate: requests per second. time_scale: gaps of a trace are multiplied by it.
    prompt_len, max_tokens: lengths if the trace has none. End ids are ignored, so that lengths are exact.
    cancel_share: share of the requests that the client cancels at some point in their output.
    timeout_s: per request.
    in_process: measure the service against the executor in this process instead, `concurrency` streams each, in
    `rounds` alternating rounds after a dropped warm-up. speculation: for the started service and the executor.
    stream_interval: of that service, as in faser.yaml.
    """

    engine_dir: Path
    output_dir: Path
    url: str | None = None
    speculation: str | None = None
    stream_interval: int | str = "auto"
    arrivals: str = "poisson"
    request_rate: float = 4.0
    burstiness: float = 0.25
    peak_ratio: float = 8.0
    period_s: float = 10.0
    trace: Path | None = None
    time_scale: float = 1.0
    num_requests: int = 200
    prompt_len: int = 64
    max_tokens: int = 128
    temperature: float = 0.0
    cancel_share: float = 0.0
    objectives: Objectives = Objectives()
    timeout_s: float = REQUEST_TIMEOUT_S
    in_process: bool = False
    concurrency: int = 32
    requests_per_stream: int = 3
    rounds: int = 5
    seed: int = 0
    command_line: tuple[str, ...] = ()

    def quick(self) -> ServeBenchOptions:
        """A run of well under a minute on the demo pair with the same outputs; too short to quote."""
        return replace(
            self,
            num_requests=min(self.num_requests, 24),
            max_tokens=min(self.max_tokens, 48),
            requests_per_stream=1,
            rounds=min(self.rounds, 2),
        )

    def validate(self) -> None:
        """Raise InvalidArgumentError for a run that cannot work or would be meaningless."""
        if self.arrivals not in ARRIVALS:
            raise InvalidArgumentError(f"arrivals is {self.arrivals!r}, it must be one of {', '.join(ARRIVALS)}")
        if (self.trace is not None) != (self.arrivals == "trace"):
            raise InvalidArgumentError("--arrivals trace and --trace FILE go together; give both or neither")
        for name in ("num_requests", "prompt_len", "max_tokens", "concurrency", "requests_per_stream", "rounds"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}, it must be 1 or more")
        for name in ("request_rate", "burstiness", "peak_ratio", "period_s", "time_scale", "timeout_s"):
            _positive(name, getattr(self, name))
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            value = getattr(self.objectives, name)
            if value is not None:
                _positive(name, value)
        if self.peak_ratio < 1.0:
            raise InvalidArgumentError(f"peak_ratio is {self.peak_ratio:g}, it must be 1 or more")
        if not 0.0 <= self.cancel_share <= 1.0:
            raise InvalidArgumentError(f"cancel_share is {self.cancel_share:g}, allowed is 0 to 1")
        if not 0.0 <= self.temperature < math.inf:
            raise InvalidArgumentError(f"temperature is {self.temperature:g}, it must be 0 or more")
        if self.url is not None and self.speculation is not None and not self.in_process:
            raise InvalidArgumentError("--speculation is for a service that the bench starts; leave it or --url out")


def _positive(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise InvalidArgumentError(f"{name} is {value:g}, it must be more than 0")
