"""One simulated run of a system with a pair on a GPU under a load."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np

from faser_trtllm.core.cost_table import CostTable
from lab.clock import ManualClock
from lab.costmodel.gpu import find_gpu
from lab.costmodel.pair import Pair
from lab.costmodel.shape import ModelShape, find_shape
from lab.costmodel.table import ExitSignal, modeled_table
from lab.planner.load.acceptance import Acceptance
from lab.planner.load.arrivals import TRACES, Lengths, generated_arrivals
from lab.planner.load.run import run_arrivals, run_closed_loop
from lab.planner.load.service import ServiceOptions, open_service

EAGLE3 = "eagle3"  # as a draft, the target's EAGLE-3 head
OFF = "off"
REQUESTS_PER_STREAM, MIN_REQUESTS = 4, 48
TRACE_S = 300.0


@dataclass(frozen=True)
class Setting:
    """A setting for comparisons. load: concurrent requests, or 0 for the trace at requests_per_s."""

    gpu: str
    target: str
    draft: str
    load: int
    num_gpus: int = 1
    acceptance: float = 0.7
    prompt_len: int = 512
    output_len: int = 256
    requests_per_s: float = 0.0
    draft_sms: int = 0  # of the green context for drafting; 0: a quarter
    seed: int = 0  # of acceptance, lengths and arrivals

    @property
    def pair(self) -> str:
        return f"{self.target} + {self.draft}"

    @property
    def load_name(self) -> str:
        return f"{self.load}" if self.load else f"azure, {self.requests_per_s:g}/s"


@dataclass(frozen=True)
class Result:
    """A result. pruned, overlapped: shares of drafted rows and of steps. wall_s: time of the simulation itself."""

    section: str
    setting: Setting
    system: str
    tokens_per_s: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    accepted: float
    pruned: float
    overlapped: float
    wall_s: float


def run_case(section: str, setting: Setting, system: str, speculation: str, max_draft_len: int = 8) -> Result:
    started_s = time.perf_counter()
    table = _table(setting)
    service = ServiceOptions(
        speculation,
        table,
        Acceptance.of(setting.acceptance),
        max_batch_size=setting.load or 256,
        max_prompt_len=max(setting.prompt_len, 4096),
        max_output_len=max(setting.output_len, 1024),
        max_draft_len=max_draft_len,
        seed=setting.seed,
    )
    clock = ManualClock()
    with open_service(service, clock) as executor:
        if setting.load:
            lengths = Lengths(setting.prompt_len, 0.0, setting.output_len, 0.3)
            requests = lengths.draw(np.random.default_rng(setting.seed), 4096, 1024)
            count = max(MIN_REQUESTS, REQUESTS_PER_STREAM * setting.load)
            report = run_closed_loop(executor, clock, requests, setting.load, count)
        else:
            arrivals = generated_arrivals(TRACES["azure"], setting.requests_per_s, TRACE_S, setting.seed)
            report = run_arrivals(executor, clock, itertools.islice(arrivals, 10_000))
        stats = executor.stats()
    drafted = max(1.0, stats["num_draft_tokens"])
    overlapped = stats.get("num_steps_ping_pong", 0.0) + stats.get("num_steps_draft_ahead", 0.0)
    return Result(
        section,
        setting,
        system,
        report.tokens_per_s,
        report.ttft_ms.percentile(0.99),
        report.tpot_ms.percentile(0.5),
        report.tpot_ms.percentile(0.99),
        stats["num_accepted_tokens"] / drafted,
        stats["num_pruned_rows"] / drafted,
        overlapped / max(1.0, stats["num_steps"]),
        time.perf_counter() - started_s,
    )


_TABLES: dict[tuple[str, str, str, int, int], CostTable] = {}


def _table(setting: Setting) -> CostTable:
    key = setting.gpu, setting.target, setting.draft, setting.num_gpus, setting.draft_sms
    if key not in _TABLES:
        _TABLES[key] = modeled_table(make_pair(setting), exit_signal=ExitSignal())
    return _TABLES[key]


def make_pair(setting: Setting) -> Pair:
    target: ModelShape = find_shape(setting.target)
    draft = target.eagle3() if setting.draft == EAGLE3 else find_shape(setting.draft)
    return Pair(find_gpu(setting.gpu), target.on(setting.num_gpus), draft, draft_sms=setting.draft_sms or None)
