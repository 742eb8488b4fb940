"""The sections of the suite in the order in which they run: first what later ones need, then by value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from faser_trtllm.errors import InvalidArgumentError

PACKAGE = "faser_trtllm.bench.gpu"


@dataclass(frozen=True)
class Section:
    """entry: "module:function", called with a Bench in a process of its own. limit_s: after which it is killed."""

    name: str
    what: str
    entry: str
    limit_s: float


SECTIONS = (
    Section(
        "environment", "versions, the device, its bandwidth and arithmetic ceilings", f"{PACKAGE}.environment:run", 40
    ),
    Section(
        "kernels", "our kernels against references, rooflines and torch's attention", f"{PACKAGE}.kernels:run", 110
    ),
    Section("gemms", "the matrix products of a pass by rows: the floor of a step", f"{PACKAGE}.gemms:run", 25),
    Section("steps", "decode and verification against the memory roofline", f"{PACKAGE}.steps:run", 60),
    Section(
        "exactness", "tokens with speculation against without, and their distribution", f"{PACKAGE}.exactness:run", 70
    ),
    Section("costs", "cost tables, as policies read them", f"{PACKAGE}.costs:run", 75),
    Section("policies", "policies, pruning and overlap by concurrency", f"{PACKAGE}.policies:run", 150),
    Section("partitions", "draft and target alone and together on shares of the SMs", f"{PACKAGE}.partitions:run", 60),
    Section("fp8", "products, passes, memory and tokens in fp8 against bf16", f"{PACKAGE}.fp8:run", 60),
    Section("peers", "transformers' assisted generation with the same weights", f"{PACKAGE}.peers:run", 60),
)


def chosen(names: Sequence[str], sections: Sequence[Section] = SECTIONS) -> list[Section]:
    """The named sections (all if none is named) in the suite's order."""
    known = [section.name for section in sections]
    for name in names:
        if name not in known:
            raise InvalidArgumentError(f"section {name} is unknown, there are {', '.join(known)}")
    return [section for section in sections if not names or section.name in names]
