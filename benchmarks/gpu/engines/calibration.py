"""Calibrate early exits and a step's overhead by real decoding, and add both to a cost table."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models.pair import OpenPair
from benchmarks.gpu.models.prompts import bench_prompts, max_tokens
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.profiling.calibrate import NUM_DRAFT_TOKENS, calibrate_executor
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.recording import RecordingPolicy


def calibrated(bench: Bench, pair: OpenPair, table: CostTable) -> CostTable:
    """Return the table with exit models and a step's overhead; exits stay empty with too few drafts."""
    options = ProfileOptions(bench.options.output_dir, max_tokens=max_tokens(bench), seed=bench.options.seed)
    policy = RecordingPolicy(min(NUM_DRAFT_TOKENS, pair.limits.max_draft_len))
    with ExitStack() as stack:
        executor = stack.enter_context(pair.executor(policy))
        executor.watch(policy)
        prompts, segments = bench_prompts(bench).token_ids, pair.target.spec.segments
        found = calibrate_executor(executor, policy, segments, prompts, table, options, lambda what, done, total: None)
    bench.record.table(
        f"{pair.name}, early exits",
        ("boundary", "layer", "dropped below", "precision", "recall", "of the draft alone", "drafts dropped", "pays"),
        [
            (
                q.boundary,
                q.layer,
                q.threshold,
                f"{q.precision:.2f}",
                f"{q.recall:.2f}",
                f"{q.baseline_precision:.2f}, {q.baseline_recall:.2f}",
                q.num_dropped,
                any(model.boundary == q.boundary and model.pays for model in found.exits),
            )
            for q in found.quality
        ],
        f"{found.num_observations} tested drafts; precision: rejected of the dropped, recall: dropped of the rejected, "
        "on drafts that no fit saw. Empty: too few drafts to tell.",
    )
    bench.record.value(f"overhead_ms {pair.name}", found.overhead_ms)
    return dataclasses.replace(table, exits=found.exits, overhead_ms=found.overhead_ms)
