"""Load, cancel, misuse and kill a service, and account for every request.

The exit code is 1 if a request, memory or a process was lost.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.common.flags import Flags, say
from benchmarks.soak.options import SoakOptions
from benchmarks.soak.runner import run_soak
from faser_trtllm.config import SPELLINGS

EXAMPLE = """Examples:
  faser bench soak --engine_dir engines/built/demo --minutes 20 --output_dir bench_results
  against a running service with --url localhost:8001 --http_url http://localhost:8000
  --metrics_url http://localhost:8002/metrics, and with --launcher_pid its processes are watched and its engine child is
  killed"""


def main(argv: Sequence[str] | None = None) -> int:
    flags = Flags("soak", SoakOptions, __doc__, EXAMPLE)
    flags.flag("engine_dir", "a directory that `faser build` wrote")
    flags.flag("output_dir", "directory for soak.json, soak.md, soak.png and server.log")
    flags.flag("minutes", "minutes of load after the warm-up")
    flags.flag("url", "gRPC address of a running service; default: start one")
    flags.flag("http_url", "HTTP address of the service at --url")
    flags.flag("metrics_url", "metrics address of the service at --url")
    flags.flag("launcher_pid", "process id of the `faser serve` that runs --url, if it is on this machine")
    flags.flag("models", "models to load; default: all of the repository")
    flags.flag("speculation", SPELLINGS)
    flags.flag("kv_cache_tokens", "tokens in the KV cache of a service that is started here")
    flags.flag("concurrency", "concurrent requests; default: 1.5 times max_batch_size")
    flags.flag("http_share", "share of requests that come over HTTP")
    flags.flag("cancel_share", "share of requests that the client cancels")
    flags.flag("bad_share", "share of requests that must be refused")
    flags.flag("late_share", "share of requests with a short deadline")
    flags.flag(
        "hostile_share", "share of requests that are worst cases of `faser bench bystander`, or whose client hangs up"
    )
    flags.flag("num_idle", "idle connections")
    flags.flag("storm_minutes", "first minutes of the load, with kills and pauses; default: a third")
    flags.flag("kill_period_s", "seconds between two kills of the engine process; 0: never")
    flags.flag("kill_server", "kill tritonserver twice within storm_minutes")
    flags.flag("pause_s", "seconds of one pause of all processes; 0: no pauses")
    flags.flag("warmup_s", "seconds of load before the baseline")
    flags.flag("max_growth_mib", "most growth of a process over the run, in MiB")
    flags.flag("max_slope_mib_per_hour", "most growth of a process after storm_minutes, in MiB per hour")
    flags.flag(
        "max_recovery_s", "most seconds from a kill of the engine process to the first token of a request sent after it"
    )
    flags.flag("seed", "seed for the requests")
    options = flags.parse(argv)
    report = run_soak(options, say)
    print((options.output_dir / "soak.md").read_text())
    return 0 if report.has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
