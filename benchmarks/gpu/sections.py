"""The sections of the suite in running order: first what later ones need, then what is right, then what is fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from faser_trtllm.errors import InvalidArgumentError


@dataclass(frozen=True)
class Section:
    """entry: "module:function" called with a Bench in its own process. limit_s: time limit, after which it is
    killed."""

    name: str
    what: str
    entry: str
    limit_s: float


def _ours(name: str, what: str, place: str, limit_s: float) -> Section:
    return Section(name, what, f"benchmarks.gpu.{place}", limit_s)


SECTIONS = (
    _ours("environment", "versions, the device, its bandwidth and arithmetic ceilings", "environment:run", 40),
    _ours("kernels", "our kernels against references, rooflines and torch's attention", "kernels.checks:run", 110),
    _ours("cuda", "an engine directory: built, decoded, timed, its memory watched", "backends.section:run_cuda", 90),
    _ours("tensorrt", "the same with our plugins, and against cuda", "backends.section:run_tensorrt", 300),
    _ours("tensorrt_rtx", "the same for RTX, and against cuda", "backends.section:run_tensorrt_rtx", 120),
    _ours("exactness", "tokens with speculation against without, distributions", "engines.exactness:run", 70),
    _ours("sanitizer", "the kernels' tests under compute-sanitizer", "kernels.sanitizer:run", 200),
    _ours("gemms", "the matrix products of a pass by rows: the floor of a step", "kernels.gemms:run", 25),
    _ours("steps", "decode and verification against the memory roofline", "engines.steps:run", 60),
    _ours("costs", "cost tables, as policies read them", "engines.costs:run", 90),
    _ours("policies", "policies, pruning and overlap by concurrency", "engines.policies:run", 150),
    _ours("partitions", "draft and target alone and together on shares of the SMs", "kernels.partitions:run", 60),
    _ours("fp8", "products, passes, memory and tokens in fp8 against bf16", "engines.fp8:run", 60),
    _ours("peers", "transformers' assisted generation with the same weights", "engines.peers:run", 60),
)


def chosen(names: Sequence[str], sections: Sequence[Section] = SECTIONS) -> list[Section]:
    """The named sections (all if none) in the suite's order."""
    known = [section.name for section in sections]
    for name in names:
        if name not in known:
            raise InvalidArgumentError(f"section {name} is unknown, there are {', '.join(known)}")
    return [section for section in sections if not names or section.name in names]
