"""Options of `faser bench soak`, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from faser_trtllm.errors import InvalidArgumentError


@dataclass(frozen=True)
class SoakOptions:
    """Options of `faser bench soak`.

    minutes: duration of the load after the warm-up, which takes warmup_s and includes one kill.
    storm_minutes: first part of the load, with kills and pauses (storm.py); 0: a third. Memory is judged in the rest.
    url, http_url, metrics_url: addresses of a running service with the same engines; None starts one. Its processes
        are only killed and watched if launcher_pid names its `faser serve`.
    late_share: share of requests with a deadline that is too short.
    kv_cache_tokens: of a service that is started here; small, so that its memory is touched while processes are killed,
        requests are preempted and cached blocks evicted.
    concurrency: concurrent requests, None: 1.5 times max_batch_size. http_share: share of them over HTTP.
    hostile_share: share of requests of hostile clients (hostile.py). num_idle: idle connections.
    kill_period_s: time between kills of the engine child; 0: no kills. kill_server: kill tritonserver, too.
    pause_s: duration of one pause of all processes; 0: no pauses.
    max_growth_mib: limit for growth of a process's resident memory over the run, by its slope.
    max_slope_mib_per_hour: limit for anonymous memory after storm_minutes, fitted at rests of 3 s each minute.
    max_log_mib_per_hour: limit for the service's log.
    max_recovery_s: limit from a kill of the engine child to the first token of a request sent after it;
        max_server_recovery_s: from a kill of the server, which reloads its engines.
    """

    engine_dir: Path
    output_dir: Path
    minutes: float = 20.0
    url: str | None = None
    http_url: str | None = None
    metrics_url: str | None = None
    launcher_pid: int | None = None
    models: tuple[str, ...] | None = None
    speculation: str | None = None
    kv_cache_tokens: int = 8192
    concurrency: int | None = None
    http_share: float = 0.15
    cancel_share: float = 0.2
    bad_share: float = 0.05
    late_share: float = 0.1
    hostile_share: float = 0.1
    num_idle: int = 100
    storm_minutes: float = 0.0
    kill_period_s: float = 120.0
    kill_server: bool = True
    pause_s: float = 90.0
    warmup_s: float = 40.0
    sample_period_s: float = 1.0
    request_timeout_s: float = 180.0
    max_growth_mib: float = 16.0
    max_slope_mib_per_hour: float = 1.0
    max_log_mib_per_hour: float = 1.0
    max_recovery_s: float = 2.0
    max_server_recovery_s: float = 15.0
    seed: int = 0
    command_line: tuple[str, ...] = ()

    @property
    def is_own_service(self) -> bool:
        return self.url is None

    @property
    def storm_s(self) -> float:
        return 60.0 * (self.storm_minutes or self.minutes / 3)

    def validate(self) -> None:
        """Raise InvalidArgumentError for a run that cannot work or would be meaningless."""
        positive = ("minutes", "warmup_s", "sample_period_s", "request_timeout_s")
        bounds = ("max_growth_mib", "max_slope_mib_per_hour", "max_log_mib_per_hour", "max_recovery_s")
        for name in (*positive, *bounds, "max_server_recovery_s"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise InvalidArgumentError(f"{name} is {value:g}; it must be more than 0")
        if self.kv_cache_tokens < 1:
            raise InvalidArgumentError(f"kv_cache_tokens is {self.kv_cache_tokens}; it must be 1 or more")
        if not 0.0 <= self.kill_period_s < math.inf:
            raise InvalidArgumentError(f"kill_period_s is {self.kill_period_s:g}; it must be 0 (no kills) or more")
        if not 0.0 <= self.pause_s < math.inf:
            raise InvalidArgumentError(f"pause_s is {self.pause_s:g}; it must be 0 (no pauses) or more")
        if not 0.0 <= self.storm_minutes < self.minutes:
            raise InvalidArgumentError(
                f"storm_minutes is {self.storm_minutes:g}, allowed is 0 (a third) to less than minutes, "
                f"{self.minutes:g}"
            )
        for name in ("http_share", "cancel_share", "bad_share", "late_share", "hostile_share"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise InvalidArgumentError(f"{name} is {value:g}, allowed is 0 to 1")
        others = self.cancel_share + self.bad_share + self.late_share
        if others >= 1.0:
            raise InvalidArgumentError(
                f"cancel_share, bad_share and late_share are {others:g} together; they must leave room for requests "
                "that finish; lower one"
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidArgumentError(f"concurrency is {self.concurrency}; it must be 1 or more")
        addresses = (self.url, self.http_url, self.metrics_url)
        if any(addresses) and not all(addresses):
            raise InvalidArgumentError("--url, --http_url and --metrics_url go together; give all of them or none")
        if self.launcher_pid is not None and self.is_own_service:
            raise InvalidArgumentError("--launcher_pid is for a service at --url; leave it out, or give --url too")
        if not self.is_own_service and (self.models is not None or self.speculation is not None):
            raise InvalidArgumentError("--models and --speculation are for a service that the soak starts; drop --url")
