"""The sections of the suite in running order, the most valuable per second first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from faser_trtllm.errors import InvalidArgumentError


@dataclass(frozen=True)
class Section:
    """A section. entry: "module:function" called with a Bench in its own process.

    typical_s: time on an H100, by which short runs choose. limit_s: it is killed after this; until then it measures on.
    """

    name: str
    what: str
    entry: str
    limit_s: float
    typical_s: float = 0.0


def _ours(name: str, what: str, place: str, typical_s: float, limit_s: float) -> Section:
    return Section(name, what, f"benchmarks.gpu.{place}", limit_s, typical_s)


# Times of an H200 or H100, 2026-11-26. steps, kernels, other_policies, tensorrt, tensorrt_rtx, peers and sanitizer
# measure more now or have not run: theirs are estimates.
SECTIONS = (
    _ours("environment", "versions, the device, its bandwidth and arithmetic ceilings", "environment:run", 8, 40),
    _ours("cuda", "an engine directory: build, runs, times, leaks of memory", "backends.section:run_cuda", 36, 90),
    _ours("exactness", "tokens with speculation against without, distributions", "engines.exactness:run", 27, 70),
    _ours("steps", "decode and verification against the memory roofline", "engines.steps:run", 35, 80),
    _ours("row_counts", "passes with a number of rows for the first time", "engines.row_counts:run", 11, 40),
    _ours("breakdown", "the kernels of a pass, by time", "engines.breakdown:run", 31, 90),
    _ours("costs", "cost tables, as policies read them", "engines.costs:run", 32, 120),
    _ours("policies", "off, fixed lengths and price by concurrency", "engines.policies:run", 96, 400),
    _ours("timeline", "parts of a step's time, with and without prompts", "engines.timeline:run", 53, 150),
    _ours("host_profile", "time of the executor's thread in a step, by function", "engines.host_profile:run", 22, 60),
    _ours("kernels", "our kernels against references, rooflines and torch's attention", "kernels.checks:run", 50, 130),
    _ours("claims", "passes, a draft step and acceptance against their goals", "kernels.claims:run", 1, 20),
    _ours("gemms", "the matrix products of a pass by rows: the floor of a step", "kernels.gemms:run", 5, 25),
    _ours("fp8", "products, passes, memory and tokens in fp8 against bf16", "engines.fp8:run", 23, 60),
    _ours("partitions", "draft and target alone and together on shares of the SMs", "kernels.partitions:run", 10, 60),
    _ours("other_policies", "other policies, longer drafts, pruning, overlap", "engines.policies:run_others", 150, 300),
    _ours("peers", "transformers' assisted generation with the same weights", "engines.peers:run", 60, 90),
    _ours("tensorrt", "cuda's section with our plugins, and against cuda", "backends.section:run_tensorrt", 120, 300),
    _ours("tensorrt_rtx", "the same for RTX, and against cuda", "backends.section:run_tensorrt_rtx", 90, 120),
    _ours("sanitizer", "the kernels' tests under compute-sanitizer", "kernels.sanitizer:run", 180, 300),
)


def chosen(names: Sequence[str], sections: Sequence[Section] = SECTIONS) -> list[Section]:
    """Return the named sections (all if none) in the suite's order."""
    known = [section.name for section in sections]
    for name in names:
        if name not in known:
            raise InvalidArgumentError(f"section {name} is unknown, there are {', '.join(known)}")
    return [section for section in sections if not names or section.name in names]


def fitting(sections: Sequence[Section], seconds: float) -> list[Section]:
    """Return the sections that fit into the time together, earlier ones first; the first one is always included."""
    found: list[Section] = []
    for section in sections:
        if not found or section.typical_s + sum(s.typical_s for s in found) <= seconds:
            found.append(section)
    return found
