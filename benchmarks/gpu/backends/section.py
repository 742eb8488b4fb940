"""Sections "cuda", "tensorrt" and "tensorrt_rtx", which run the trained pair as that backend's engine directory.

It is built, compared with cuda, timed, run with and without speculation, and checked for leaks of memory. Each backend
has its own process, since the two TensorRT modules are not meant to share one.
"""

from __future__ import annotations

import time
from collections import Counter

from benchmarks.gpu.backends.built import REFERENCE, build, check_installed, open_built
from benchmarks.gpu.backends.parity import Reference, compare, read_reference
from benchmarks.gpu.backends.passes import time_passes
from benchmarks.gpu.backends.pruning import PruningPolicy
from benchmarks.gpu.backends.soak import soak
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines.exactness import greedy, policy_of
from benchmarks.gpu.models.pair import OpenPair
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.builder.plan_file import PlanFile
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.decision import Mode
from faser_trtllm.policy.base import Policy
from faser_trtllm.policy.registry import make_policy

SETTINGS = ("fixed:4", "fixed:8", "fixed:4,mode=draft_ahead", "fixed:4,mode=ping_pong")
NUM_PRUNED_DRAFTS = 4


def run_cuda(bench: Bench) -> None:
    _run(bench, REFERENCE)


def run_tensorrt(bench: Bench) -> None:
    _run(bench, "tensorrt")


def run_tensorrt_rtx(bench: Bench) -> None:
    _run(bench, "tensorrt_rtx")


def _run(bench: Bench, backend: str) -> None:
    """Run all steps; a failure is recorded, and the next step runs."""
    check_installed(bench, backend)
    if bench.record.attempt("build", lambda: _build(bench, backend)) is None:
        return
    reference = None
    if backend != REFERENCE:
        reference = bench.record.attempt("tokens and logits of cuda", lambda: _reference(bench))
    with open_built(bench, backend) as pair:
        if reference is not None:
            bench.record.attempt("comparison with cuda", lambda: compare(bench, pair, reference))
        table = bench.record.attempt("passes", lambda: time_passes(bench, pair))
        bench.record.attempt("speculation", lambda: _speculate(bench, pair, table))
        bench.record.attempt("memory", lambda: soak(bench, pair))


def _build(bench: Bench, backend: str) -> EngineDir:
    begun = time.monotonic()
    engines = build(bench, backend)
    plugins = plugins_of(engines) if backend != REFERENCE else Counter()
    needs = engines.manifest.get("requirements", {})
    size = sum(path.stat().st_size for path in (engines.target_path, engines.draft_path))
    rows = [
        ("seconds", f"{time.monotonic() - begun:.1f}"),
        ("MiB", f"{size / (1 << 20):.1f}"),
        ("segments end at layers", ", ".join(map(str, engines.manifest["segments"][1:]))),
        ("TensorRT", needs.get("tensorrt_version")),
        ("plugins, in so many plans", ", ".join(f"{name}: {n}" for name, n in sorted(plugins.items())) or None),
    ]
    bench.record.table("The trained pair, built", ("what", ""), rows, "Not enlarged. A build that is there is kept.")
    if backend == "tensorrt" and not plugins:
        bench.record.error("no plan of tensorrt calls a plugin of ours")
    return engines


def plugins_of(engines: EngineDir) -> Counter[str]:
    """Return for each plugin the number of plans of target and draft that call it."""
    found: Counter[str] = Counter()
    for path in (engines.target_path, engines.draft_path):
        with PlanFile.open(path) as file:
            found.update(name for plan in file.plans for name in plan.info.plugins)
    return found


def _reference(bench: Bench) -> Reference:
    with open_built(bench, REFERENCE) as pair:
        return read_reference(bench, pair)


def _speculate(bench: Bench, pair: OpenPair, table: CostTable | None) -> None:
    """Run all modes, pruning inside the passes, and price with the table."""
    limits, boundaries = pair.limits, tuple(range(1, len(pair.target.spec.segments) - 1))
    policies: dict[str, Policy] = {spelling: policy_of(pair, spelling) for spelling in SETTINGS}
    for mode in Mode if boundaries else ():
        policies[f"pruned, {mode.value}"] = PruningPolicy(NUM_PRUNED_DRAFTS, boundaries, mode)
    if table is not None:
        policies["price"] = make_policy("price", limits.max_draft_len, table, limits.max_batch_size)
    greedy(bench, pair, limits.max_batch_size, policies)
