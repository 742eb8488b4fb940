"""Run `faser bench soak` and write soak.json, soak.md, soak.png and the server's log."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial

from benchmarks.common.environment import describe_environment
from benchmarks.soak.growth import MIB, count_lives, fit_trends, measure_growth
from benchmarks.soak.hostile import HostileClients, idle_connections
from benchmarks.soak.jobs import BadInput, Job, Planner, make_bad_inputs, make_jobs
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.load import GrpcLoad, HttpWorker
from benchmarks.soak.options import SoakOptions
from benchmarks.soak.plot import write_plot
from benchmarks.soak.report import SoakReport, render_markdown
from benchmarks.soak.service import Service, wait_idle
from benchmarks.soak.storm import Event, Storm, plan_events
from benchmarks.soak.verdict import Resting, are_counts_back, judge_run
from benchmarks.soak.watch import ENGINE, Sample, ServiceProcesses, Watch
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.models.tokenizer import Tokenizer

Log = Callable[[str], None]

_IDLE_S = 20.0  # time for the engine's gauges to become idle
_MAX_REST_S = 60.0  # time for the load's descriptors and threads to disappear
_STEADY_S = 5.0
_TELL_S = 30.0
_NUM_HOSTILE = 2  # clients
_SETTLE_SHARE = 1 / 3  # of the calm part, before memory is judged
_REST_PERIOD_S = 60.0  # load between two rests in the calm part
_REST_S = 3.0  # a rest, after which idle processes have returned memory


def run_soak(options: SoakOptions, log: Log) -> SoakReport:
    """Load the service, write the report to output_dir and return it; FaserError if the service cannot start."""
    options.validate()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    log("asking the target alone for the texts")
    jobs = make_jobs(options.engine_dir, options.seed)
    with Service(options, options.output_dir / "server.log") as service:
        report = _Soak(options, service, jobs, log).run()
    (options.output_dir / "soak.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    (options.output_dir / "soak.md").write_text(render_markdown(report))
    write_plot(report, options.output_dir / "soak.png")
    return report


class _Soak:
    def __init__(self, options: SoakOptions, service: Service, jobs: tuple[Job, ...], log: Log) -> None:
        engines = EngineDir.load(options.engine_dir)
        built = engines.build_config
        vocab_size = Tokenizer.load(engines.tokenizer_dir).vocab_size
        self._options = options
        self._service = service
        self._jobs = jobs
        self._bad_inputs: tuple[BadInput, ...] = make_bad_inputs(vocab_size, built.max_seq_len)
        self._concurrency = options.concurrency or max(2, 3 * built.max_batch_size // 2)
        self._log = log

    def run(self) -> SoakReport:
        options, service = self._options, self._service
        self._log(f"warming up for {options.warmup_s:g} s, {self._concurrency} requests in flight")
        warmup = Ledger()
        first = [Event(options.warmup_s / 2, "kill", (ENGINE,))] if options.kill_period_s > 0 else []
        self._load(warmup, options.warmup_s, first, options.seed + 1)
        baseline = self._rest(None)
        ledger = Ledger()
        start_s = time.monotonic()
        self._log(f"load for {options.minutes:g} minutes")
        samples: list[Sample] = []
        rests: list[Sample] = []
        log_bytes = service.log_bytes()
        if service.processes is None:
            self._load(ledger, 60 * options.minutes, [], options.seed + 2)
        else:
            with Watch(service.processes, options.sample_period_s, lambda: ledger.num_tokens) as watch:
                self._load(ledger, options.storm_s, plan_events(options), options.seed + 2)
                rests = self._calm(ledger, service.processes, start_s + 60 * options.minutes)
            samples = watch.samples
        seconds = time.monotonic() - start_s
        log_mib_per_hour = (service.log_bytes() - log_bytes) / MIB * 3600 / seconds
        end = self._rest(baseline)
        leftovers = service.stop()
        calm_s = start_s + options.storm_s + _SETTLE_SHARE * (seconds - options.storm_s)
        calm = [sample for sample in samples if sample.at_s >= calm_s]
        growths, trends = measure_growth(calm), fit_trends([rest for rest in rests if rest.at_s >= calm_s])
        judged = (growths, leftovers, trends, count_lives(samples), log_mib_per_hour)
        return SoakReport(
            options,
            describe_environment(options.command_line),
            seconds,
            start_s,
            self._concurrency,
            warmup,
            ledger,
            tuple(judge_run(options, warmup, ledger, baseline, end, *judged)),
            baseline,
            end,
            tuple(growths),
            tuple(trends),
            samples,
        )

    def _calm(self, ledger: Ledger, processes: ServiceProcesses, end_s: float) -> list[Sample]:
        """Run the load without events until end_s; return a sample of each rest, when no request is open."""
        rests: list[Sample] = []
        while (left_s := end_s - time.monotonic()) > _REST_S and self._service.is_running():
            self._load(ledger, min(_REST_PERIOD_S, left_s - _REST_S), [], self._options.seed + 3 + len(rests))
            time.sleep(_REST_S)
            rests.append(processes.sample())
        return rests

    def _load(self, ledger: Ledger, seconds: float, events: list[Event], seed: int) -> None:
        """Run the load for this long, with events, until every request has ended."""
        options = self._options
        planners = [
            Planner(
                self._jobs,
                self._bad_inputs,
                cancel_share=options.cancel_share,
                bad_share=options.bad_share,
                late_share=options.late_share,
                seed=seed * 1009 + number,
            )
            for number in range(self._concurrency)
        ]
        num_http = round(options.http_share * self._concurrency)
        stop = threading.Event()
        workers = [
            HttpWorker(self._service.http_url, ledger, options.request_timeout_s, planner)
            for planner in planners[:num_http]
        ]
        grpc_load = GrpcLoad(self._service.url, ledger, options.request_timeout_s)
        failures: list[BaseException] = []

        def guarded(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)
                stop.set()

        works = [partial(worker.run, stop) for worker in workers]
        works.append(partial(grpc_load.run, planners[num_http:], stop))
        if options.hostile_share:
            works += [partial(self._hostile(ledger, seed + number).run, stop) for number in range(_NUM_HOSTILE)]
        threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        try:
            urls = (self._service.http_url, f"http://{self._service.url}")
            with idle_connections(urls, options.num_idle):
                self._wait(ledger, seconds, events, stop)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]

    def _hostile(self, ledger: Ledger, seed: int) -> HostileClients:
        service, options = self._service, self._options
        share, timeout_s = options.hostile_share, options.request_timeout_s
        return HostileClients(service.url, service.http_url, ledger, self._jobs, share, seed, timeout_s)

    def _wait(self, ledger: Ledger, seconds: float, events: list[Event], stop: threading.Event) -> None:
        """Kill, pause and report progress until the time is over."""
        start_s = time.monotonic()
        processes = self._service.processes
        storm = None if processes is None else Storm(events, processes, ledger, self._log)
        next_tell_s = start_s + _TELL_S
        while not stop.is_set() and (now_s := time.monotonic()) < start_s + seconds:
            if storm is not None:
                storm.step(stop)
            if now_s >= next_tell_s:
                next_tell_s += _TELL_S
                self._log(f"{now_s - start_s:.0f} s: {ledger.summary()}")
            if not self._service.is_running():
                self._log("the service has ended")
                stop.set()
            stop.wait(0.05)

    def _rest(self, baseline: Resting | None) -> Resting:
        """Wait until the service is idle and descriptors and threads are steady or at the baseline."""
        gauges = wait_idle(self._service, _IDLE_S)
        processes = self._service.processes
        if processes is None:
            return Resting(gauges, None)
        deadline_s = time.monotonic() + _MAX_REST_S
        last, steady_s = processes.sample(), time.monotonic()
        while time.monotonic() < deadline_s:
            time.sleep(0.25)
            now = processes.sample()
            if _counts(now) != _counts(last):
                last, steady_s = now, time.monotonic()
            if baseline is not None and baseline.sample is not None:
                if are_counts_back(baseline.sample, now):
                    break
            elif time.monotonic() - steady_s > _STEADY_S:
                break
        return Resting(gauges, processes.sample())


def _counts(sample: Sample) -> list[tuple[str, int, int]]:
    return sorted((role, p.num_fds, p.num_threads) for role, p in sample.processes.items())
