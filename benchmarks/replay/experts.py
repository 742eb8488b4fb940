"""Simulate mixtures of experts on an H100: `price`, `price` with costs by rows only, off and fixed lengths.

Time follows constants fitted to NVIDIA's operator tables for an H100 (aiconfigurator-core 0.12.0): a part of each pass
without its experts, and a time per distinct expert. Experts of rows and acceptance of drafts are random. Nothing here
was measured on a GPU by us.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.replay.recording import NUM_OUTPUT, PROMPT_LEN, Recording
from benchmarks.replay.simulate import Machine, draw_jobs, open_replay, run_closed_loop
from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.core.cost_curve import CostCurve, CostSample
from faser_trtllm.core.cost_table import ALL, MODELED, CostTable, Fingerprint
from faser_trtllm.core.plan import StepRecord
from faser_trtllm.executor.stats import StepWatcher
from faser_trtllm.profiling.grid import Limits, Point
from faser_trtllm.profiling.measure import sample_of
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.profile import grid
from lab.clock import ManualClock
from lab.simulation.router import SyntheticRouter

MAX_DRAFT_LEN = 8
PRICE, BY_ROWS, OFF = "price", "price by rows", "off"
POLICY = "price:mode=serial,prune=off"
NUM_RIVALS = 3  # fixed lengths that run
CONTEXT = PROMPT_LEN + NUM_OUTPUT // 2
MOST_ROWS = 2048
GB_PER_MS, FLOP_PER_MS = 3.1, 600e9  # reading weights, and arithmetic
KERNELS_MS, HOST_MS, DRAFT_MS = 0.020, 0.25, 0.08  # a layer's small kernels, the host per step, a draft step's launches
NUM_POSITIONS = PROMPT_LEN + NUM_OUTPUT + MAX_DRAFT_LEN + 2
NUM_TOPICS = 16  # topics of requests, by slot


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in bf16. fixed_us, expert_us, row_us: a layer's time in all, per distinct expert and row.

    layer_params: without experts. token_bytes: a token's cache in one layer.
    """

    name: str
    num_layers: int
    routing: Routing
    fixed_us: float
    expert_us: float
    row_us: float
    layer_params: float
    head_params: float
    draft_params: float
    token_bytes: float

    def table(self) -> CostTable:
        rows = np.arange(1, MOST_ROWS + 1)
        layer_ms = KERNELS_MS + 1e-3 * (self.fixed_us + self.row_us * rows) + _matrix_ms(self.layer_params, rows)
        ms = self.num_layers * layer_ms + _matrix_ms(self.head_params, rows)
        request_ms = self.num_layers * self.token_bytes / (1e9 * GB_PER_MS)
        verify = CostCurve(
            tuple(rows.tolist()),
            tuple(ms.tolist()),
            per_request_context_ms=request_ms,
            per_expert_ms=1e-3 * self.num_layers * self.expert_us,
        )
        draft_ms = DRAFT_MS + _matrix_ms(self.draft_params, rows)
        draft = CostCurve(tuple(rows.tolist()), tuple(draft_ms.tolist()))
        curves = {f"verify@{ALL}": verify, f"draft_step@{ALL}": draft, f"draft_rows@{ALL}": draft}
        return CostTable(
            Fingerprint("H100", "sm_90", 132, ""), curves, overhead_ms=HOST_MS, source=MODELED, routing=self.routing
        )


def _matrix_ms(params: float, rows: np.ndarray) -> np.ndarray:
    """Return the 2-norm of the times to read weights and to compute."""
    return np.hypot(2e-9 * params / GB_PER_MS, 2.0 * params * rows / FLOP_PER_MS)


# Sizes are from published config.json files, times of experts fitted to the tables.
QWEN3_30B = Mixture("Qwen3-30B-A3B", 48, Routing(128, 8), 22.7, 3.13, 0.09, 19.1e6, 311e6, 133e6, 2048)
GPT_OSS_20B = Mixture("gpt-oss-20b", 24, Routing(32, 4), 40.0, 5.0, 0.13, 26.6e6, 579e6, 208e6, 2048)
GPT_OSS_120B = Mixture("gpt-oss-120b", 36, Routing(128, 4), 40.0, 5.0, 0.06, 26.9e6, 579e6, 208e6, 2048)
MIXTURES = {mixture.name: mixture for mixture in (QWEN3_30B, GPT_OSS_20B, GPT_OSS_120B)}


def profiled(
    truth: CostTable, random: SyntheticRouter, max_requests: int, *, by_rows: bool = False, noise: float = 0.02
) -> CostTable:
    """Return the table of a quick profile. random: the router of random tokens. by_rows: a profile without experts,
    which runs the same tokens in all requests."""
    rng = np.random.default_rng(0)
    limits = Limits(1024, max_requests, 320, MAX_DRAFT_LEN)
    samples: list[CostSample] = []
    counts: list[tuple[float, float, float]] = []
    for point in grid(limits, (ALL,), ProfileOptions(Path(), quick=True), has_experts=not by_rows):
        sample = sample_of(point, 0.0)
        ms, num_experts = _timed(truth, random, point, sample, by_rows)
        if num_experts and not point.same_tokens:
            counts.append((point.num_rows, point.num_requests, num_experts))
        ms *= float(np.exp(rng.normal(0.0, noise)))
        samples.append(replace(sample, ms=ms, num_experts=0.0 if by_rows else num_experts))
    assert truth.routing is not None
    routing = None if by_rows else truth.routing.fitted(counts)
    return replace(
        CostTable.fit(samples, truth.fingerprint, routing=routing, quick=True), overhead_ms=truth.overhead_ms
    )


def _timed(
    truth: CostTable, random: SyntheticRouter, point: Point, sample: CostSample, by_rows: bool
) -> tuple[float, float]:
    rows, requests = point.num_rows, point.num_requests
    if point.kind == "draft_step":
        return truth.draft_step_ms(requests, sample.context_len), 0.0
    if point.kind == "draft_rows":
        return truth.draft_rows_ms(rows, requests, sample.context_len), 0.0
    each = np.bincount(np.arange(rows) % requests)
    slots = np.zeros(rows, np.int32) if by_rows or point.same_tokens else np.repeat(np.arange(requests), each)
    places = np.concatenate([np.arange(n) for n in each])
    num_experts = random.distinct(slots, places)
    return truth.verify_ms(rows, requests, sample.context_len, ALL, num_experts), num_experts


def random_recording(acceptance: float, num_texts: int = 24, seed: int = 0) -> Recording:
    """Return texts whose drafts pass with this probability at any place; margins have no information."""
    passes = np.random.default_rng(seed).random((num_texts, NUM_OUTPUT, MAX_DRAFT_LEN)) < acceptance
    margins = np.ones(passes.shape, np.float32)
    right = np.cumprod(passes, axis=2).sum(2).astype(np.int32)
    return Recording(np.arange(num_texts) >= num_texts // 2, right, margins)


def rates(
    mixture: Mixture,
    overlap: float,
    acceptance: float,
    load: int,
    policies: Sequence[str] = (PRICE, BY_ROWS),
    num_jobs: int = 24,
    across: float = 0.0,
) -> dict[str, float]:
    """Return expected tokens per second of the policies, off and the best fixed lengths, in the second half of a run.

    overlap, across: of the text's rows, as in Routing.
    """
    routing = replace(mixture.routing, overlap=overlap, across=across)
    router = SyntheticRouter(routing, NUM_TOPICS, NUM_POSITIONS)
    random = SyntheticRouter(replace(routing, overlap=max(routing.chance, across)), NUM_TOPICS, 64, seed=1)
    truth, recording = mixture.table(), random_recording(acceptance)
    jobs = draw_jobs(recording, 2 * num_jobs + load, 0, (NUM_OUTPUT // 2, NUM_OUTPUT))
    found = {}
    for policy in (OFF, *best_lengths(truth, router, acceptance, load), *policies):
        believed = profiled(truth, random, max(load, 16), by_rows=policy == BY_ROWS)
        machine = Machine(truth, lambda plan: HOST_MS, believed, router)
        clock = ManualClock()
        with open_replay(recording, machine, POLICY if policy in (PRICE, BY_ROWS) else policy, load, clock) as executor:
            expected = ExpectedTokens(acceptance)
            executor.watch(expected)
            run_closed_loop(executor, clock.now_s, jobs, load, num_jobs)
            found[policy] = expected.rate(0.5)
    return found


def best_lengths(truth: CostTable, router: SyntheticRouter, acceptance: float, load: int) -> list[str]:
    """Return the NUM_RIVALS fixed lengths with the most tokens per ms in steps without prompts."""
    goodputs = {}
    for k in range(1, MAX_DRAFT_LEN + 1):
        requests = np.repeat(np.arange(load), 1 + k)
        starts = range(0, NUM_POSITIONS - k, NUM_POSITIONS // 8)
        experts = [router.distinct(requests, np.tile(np.arange(p, p + 1 + k), load)) for p in starts]
        pass_ms = truth.verify_ms(load * (1 + k), load, CONTEXT, ALL, float(np.mean(experts)))
        tokens = load * float((acceptance ** np.arange(k + 1)).sum())
        goodputs[f"fixed:{k}"] = tokens / (pass_ms + k * truth.draft_step_ms(load, CONTEXT) + HOST_MS)
    return sorted(goodputs, key=goodputs.__getitem__)[-NUM_RIVALS:]


class ExpectedTokens(StepWatcher):
    """A counter of each step's expected tokens, which vary less than the real ones."""

    def __init__(self, acceptance: float) -> None:
        self._tokens = np.cumsum(acceptance ** np.arange(MAX_DRAFT_LEN + 1))
        self._steps: list[tuple[float, float]] = []  # (end, tokens) of each step

    def step(self, record: StepRecord) -> None:
        lengths = record.result.num_verified[: record.plan.scheduled.num_decoding]
        self._steps.append((record.updated_s, float(self._tokens[lengths].sum())))

    def rate(self, share: float) -> float:
        """Return tokens per second without the first share of the time."""
        times, tokens = np.array(self._steps).T
        first = int(np.searchsorted(times, share * times[-1]))
        return float(tokens[first + 1 :].sum() / (times[-1] - times[first]))


def best_rival(found: Mapping[str, float]) -> str:
    """Return the best of off and the fixed lengths."""
    return max((name for name in found if name not in (PRICE, BY_ROWS)), key=found.__getitem__)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="faser bench replay.experts", description=__doc__)
    parser.add_argument("--mixtures", default=",".join(MIXTURES))
    parser.add_argument("--overlaps", default="0.2,0.45")
    parser.add_argument("--acceptance", default="0.5,0.7,0.9")
    parser.add_argument("--loads", default="1,4,16,64", help="concurrent requests")
    parser.add_argument("--jobs", type=int, default=48, help="least number of measured requests")
    given = parser.parse_args(argv)
    print("SIMULATED. Tokens/s over those of off; in brackets over the best of off and the fixed lengths\n")
    print("| mixture | overlap | acceptance | requests | best | price | price by rows |\n|---|---|---|---|---|---|---|")
    for name in given.mixtures.split(","):
        for overlap in map(float, given.overlaps.split(",")):
            for acceptance in map(float, given.acceptance.split(",")):
                for load in map(int, given.loads.split(",")):
                    found = rates(MIXTURES[name], overlap, acceptance, load, num_jobs=max(given.jobs, 2 * load))
                    best = best_rival(found)
                    cells = [f"{found[p] / found[OFF]:.3f} ({found[p] / found[best]:.3f})" for p in (PRICE, BY_ROWS)]
                    gain = f"{best} {found[best] / found[OFF]:.3f}"
                    line = (name, f"{overlap:g}", f"{acceptance:g}", str(load), gain, *cells)
                    print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
