"""`faser check --trtllm`: compare the installed TensorRT-LLM with the one that our adapters were written for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from faser_trtllm.config import CapacitySchedulerPolicy, SchedulerKind
from faser_trtllm.errors import ConfigError
from faser_trtllm.trtllm.gate import Bindings, installed_version, is_accepted, load_bindings, require_drafter
from lab.trtllm_check.api_surface import DRAFTER, SCHEDULER, ApiSurface, load_api_surface
from lab.trtllm_check.conformance import compare
from lab.trtllm_check.tiny_model import run_tiny_model
from lab.trtllm_check.vectors import Vector, load_vectors, run_on_tensorrt_llm

LABELS = {True: "ok", False: "DIFFERS"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table; notes names the parts that could not be inspected."""

    kind: str
    name: str
    problem: str = ""
    notes: str = ""

    def __str__(self) -> str:
        text = f"{LABELS[not self.problem]:8}{self.kind:11}{self.name}"
        return (
            text + (f": {self.problem}" if self.problem else "") + (f" (not seen: {self.notes})" if self.notes else "")
        )


def check_tensorrt_llm() -> int:
    """Print a table and a verdict; return 0 if all is as recorded, else 1. ConfigError without such a package."""
    version = installed_version("the check")
    release = require_drafter()
    surfaces = [load_api_surface(DRAFTER, release)]
    if is_accepted(version):
        surfaces.insert(0, load_api_surface(SCHEDULER, release))
    print(f"TensorRT-LLM {version}, against the contracts recorded for {release}", flush=True)
    for surface in surfaces:
        print(f"{surface.name}: recorded from {surface.recorded_from}", flush=True)
    if len(surfaces) == 1:
        print(f"scheduler: none is recorded for {release}; scheduler: trtllm is for 1.2", flush=True)
    lines: list[Line] = []
    for line in _check(surfaces):
        print(line, flush=True)
        lines.append(line)
    wrong = [line for line in lines if line.problem]
    if wrong:
        first = wrong[0]
        print(
            f"verdict: {len(wrong)} of {len(lines)} checks differ from what was recorded, first {first.name} "
            f"({first.problem}); do not use {_concerned(wrong)} with this version"
        )
        return 1
    print(f"verdict: all {len(lines)} checks are as recorded for TensorRT-LLM {release}")
    return 0


def _concerned(wrong: list[Line]) -> str:
    only_drafter = all(line.kind == DRAFTER for line in wrong)
    only_scheduler = all(line.kind != DRAFTER for line in wrong)
    return "FaserDrafter" if only_drafter else "scheduler: trtllm" + ("" if only_scheduler else " and FaserDrafter")


def _check(surfaces: list[ApiSurface]) -> Iterator[Line]:
    for surface in surfaces:
        for finding in compare(surface.entries):
            yield Line(surface.name, finding.name, "; ".join(finding.problems), "; ".join(finding.unseen))
    if surfaces[0].name != SCHEDULER:
        return
    try:
        bindings = load_bindings()
    except ConfigError as error:
        yield Line("vector", "all", f"none could be run: {error}")
        return
    for vector in load_vectors():
        yield Line("vector", vector.id, _run_vector(vector, bindings))
    for capacity in CapacitySchedulerPolicy:
        yield _run_model(capacity)


def _run_vector(vector: Vector, bindings: Bindings) -> str:
    """Return the difference from the recorded schedule, "" for none. Any exception of TensorRT-LLM is a difference."""
    try:
        seen = run_on_tensorrt_llm(vector, bindings).seen_as(vector.expect)
    except Exception as error:
        return _sentence(error)
    return "" if seen == vector.expect else f"the schedule is {seen}, recorded is {vector.expect}"


def _run_model(capacity: CapacitySchedulerPolicy) -> Line:
    """Run the same requests under both schedulers, whose tokens must be equal."""
    name = f"tiny model, {capacity.value}"
    try:
        theirs = run_tiny_model(SchedulerKind.TRTLLM, capacity)
    except Exception as error:
        return Line("run", name, _sentence(error))
    ours = run_tiny_model(SchedulerKind.NATIVE, capacity)
    if theirs.tokens != ours.tokens:
        wrong = [request for request, tokens in ours.tokens.items() if theirs.tokens[request] != tokens]
        return Line("run", name, f"tokens of requests {', '.join(wrong)} are not those of the native scheduler")
    counts = f"{sum(map(len, ours.tokens.values()))} tokens, {theirs.num_accepted} drafts accepted"
    return Line("run", f"{name}: {counts}, {theirs.num_chunks} unfinished chunks, {theirs.num_paused} pauses")


def _sentence(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"it raises {type(error).__name__}: {lines[0] if lines else 'no message'}"
