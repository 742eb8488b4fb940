"""The cost model's arithmetic for systems that the executor lacks: trees, several drafters, other ways to overlap.

All requests of a step are equal, and a system uses the best length, tree or split for the load. So figures are compared
with serial steps of the same arithmetic, never with simulated ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from benchmarks.model.steps import ping_pong_ms, step_ms
from benchmarks.paper.case import Setting, make_pair
from benchmarks.paper.expected import levels, tokens_per_step
from lab.costmodel.gpu import find_gpu
from lab.costmodel.pair import CATCH_UP_ROWS, Pair
from lab.costmodel.passes import OVERLAP_POWER

LENGTHS = range(1, 9)
SPLITS = (8, 16, 24, 32, 48, 64)  # SMs that draft
SPECINFER = (1, 1, 3, 1, 1, 1, 1, 1)  # default expansion of its artifact
CAUGHT, CAUGHT_AT_MOST = 0.45, 0.8  # share of top-1's failures, by ranks 2 and 3, from SpecInfer's rates
NUM_VOTERS, CAUGHT_BY_VOTE = 3, 0.28  # Smurfs-like: voting drafters, and the failures that a vote corrects; assumed
TREES = tuple(
    (*head, *(1,) * tail)
    for head in ((2,), (3,), (4,), (2, 2), (3, 2), (1, 2), (1, 3), (1, 1, 2), (1, 1, 3))
    for tail in range(6)
)
SHARED_CACHE = 1.03  # factor on memory times while both run and evict each other's lines; assumed
MEMORY_BOUND = 0.75  # share of the bandwidth that memory-bound passes reach
KERNELS_PER_LAYER, WAIT_MS = 7, 0.01  # of the draft model; wait until running blocks end, without preemption; assumed


@dataclass(frozen=True)
class Answer:
    """Tokens per ms by system, and the base of comparison."""

    setting: Setting
    base: str
    rates: dict[str, float]
    draft_sms: int

    @property
    def ratios(self) -> dict[str, float]:
        return {system: rate / self.rates[self.base] for system, rate in self.rates.items()}


def baselines(settings: Iterable[Setting]) -> Iterator[Answer]:
    """Yield SpecInfer-like trees, a Smurfs-like pipeline and chains, over a chain of five."""
    for setting in settings:
        pair = make_pair(setting)
        rates = {
            "chain of 5": _serial(pair, setting, 5),
            "best chain": max(_serial(pair, setting, k) for k in (0, *LENGTHS)),
            "SpecInfer-like tree": _tree(pair, setting, SPECINFER, CAUGHT),
            "the same, sampled": _tree(pair, setting, SPECINFER, CAUGHT_AT_MOST),
            "best tree": max(_tree(pair, setting, widths, CAUGHT) for widths in TREES),
            "best tree, sampled": max(_tree(pair, setting, widths, CAUGHT_AT_MOST) for widths in TREES),
        }
        rates["Smurfs-like, one drafter"], sms = _best_split(setting)
        rates[f"Smurfs-like, {NUM_VOTERS} drafters"], _ = _best_split(setting, NUM_VOTERS, CAUGHT_BY_VOTE)
        yield Answer(setting, "chain of 5", rates, sms)


def streams(settings: Iterable[Setting]) -> Iterator[Answer]:
    """Yield two alternating half batches, by the way in which they share the GPU, over serial steps."""
    for setting in settings:
        pair = make_pair(setting)
        rates = {"serial": max(_serial(pair, setting, k) for k in LENGTHS)}
        rates["green contexts"], sms = _best_split(setting)
        rates["time slices"] = max(_sliced(pair, setting, k) for k in LENGTHS)
        rates["priority, ideal"] = max(_prioritized(pair, setting, k, 0.0) for k in LENGTHS)
        rates["priority, 10 us per kernel"] = max(_prioritized(pair, setting, k, WAIT_MS) for k in LENGTHS)
        yield Answer(setting, "serial", rates, sms)


def _context(setting: Setting) -> float:
    return setting.prompt_len + setting.output_len / 2


def _tokens(setting: Setting, length: int) -> float:
    return setting.load * tokens_per_step(setting.acceptance, (1,) * length)


def _serial(pair: Pair, setting: Setting, length: int) -> float:
    return _tokens(setting, length) / step_ms(pair, length, setting.load, _context(setting))


def _tree(pair: Pair, setting: Setting, widths: tuple[int, ...], caught: float) -> float:
    """Return tokens per ms of a tree; each level is one step of the draft model on the nodes of the last one."""
    nodes, n, context = levels(widths), setting.load, _context(setting)
    drafting_ms = pair.draft_rows_ms(CATCH_UP_ROWS * n, n, context)
    drafting_ms += sum(pair.draft_rows_ms(n * width, n, context) for width in nodes[:-1])
    verify_ms = pair.verify_ms(n * (1 + sum(nodes)), n, context)
    return n * tokens_per_step(setting.acceptance, widths, caught) / (drafting_ms + verify_ms + pair.host.step_ms)


def _best_split(setting: Setting, num_drafters: int = 1, caught: float = 0.0) -> tuple[float, int]:
    """Return tokens per ms of two half batches in turn on green contexts, and the SMs that draft."""
    num_sms = find_gpu(setting.gpu).num_sms
    found = []
    for sms in SPLITS:
        if sms < num_sms:
            pair = make_pair(replace(setting, draft_sms=sms))
            for k in LENGTHS:
                acceptance = setting.acceptance + caught * (1.0 - setting.acceptance)
                tokens = setting.load * tokens_per_step(acceptance, (1,) * k)
                found.append((tokens / ping_pong_ms(pair, k, setting.load, _context(setting), num_drafters), sms))
    return max(found)


def _sliced(pair: Pair, setting: Setting, length: int) -> float:
    """Return a bound for two processes without MPS, which have the whole GPU in turn, without costs of switching."""
    half, context = setting.load / 2, _context(setting)
    ms = pair.drafting_ms(length, half, context) + pair.verify_ms(half * (1 + length), half, context)
    return _tokens(setting, length) / (2.0 * ms)


def _prioritized(pair: Pair, setting: Setting, length: int, wait_ms: float) -> float:
    """Return a bound for two streams, or two processes under MPS, on all SMs, where drafting goes first.

    Verification has the rest of bandwidth and compute. Each kernel of the draft model waits for wait_ms.
    """
    half, context, gpu = setting.load / 2, _context(setting), pair.gpu
    draft_ms = pair.drafting_ms(length, half, context)
    verify_ms = pair.verify_ms(half * (1 + length), half, context)
    memory, compute = pair.traffic.gb_per_ms["all"], gpu.tflops

    def drawn(ms: float, gb: float, gflop: float) -> tuple[float, float]:
        return min(0.99, gb / ms / memory), min(0.99, gflop / ms / compute)

    draft = drawn(draft_ms, length * pair.draft.pass_gb(half, context), length * half * pair.draft.shape.gflop_per_row)
    verify = drawn(verify_ms, pair.target.pass_gb(half, context), half * (1 + length) * pair.target.shape.gflop_per_row)
    p = OVERLAP_POWER
    slower = 1.0
    for taken, used, extra in zip(draft, verify, (SHARED_CACHE, 1.0), strict=True):
        share = min(1.0, used / MEMORY_BOUND) ** p
        slower += share * ((extra / (1.0 - taken)) ** p - 1.0)
    slower = float(slower ** (1.0 / p))
    waits_ms = wait_ms * length * KERNELS_PER_LAYER * pair.draft.shape.num_layers
    left_ms = max(0.0, verify_ms - draft_ms / slower - waits_ms)
    return _tokens(setting, length) / (2.0 * (draft_ms + waits_ms + left_ms + pair.host.step_ms))
