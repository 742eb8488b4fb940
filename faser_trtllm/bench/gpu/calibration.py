"""What early exits foresee and what a step costs beside its passes, from real decoding; added to a cost table."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

from faser_trtllm.bench.gpu.bench import Bench
from faser_trtllm.bench.gpu.pair import Pair
from faser_trtllm.bench.gpu.prompts import bench_prompts, max_tokens
from faser_trtllm.bench.policies.drive import drive
from faser_trtllm.bench.policies.workload import closed_loop, draw_jobs
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.profiling.exit_models import fit_exit_models, judge
from faser_trtllm.profiling.recording import RecordingPolicy

NUM_DRAFT_TOKENS = 6
CONCURRENCY = 8
NUM_SINGLE = 3  # requests decoded one by one, where a step's own time shows best
TEMPERATURE, SAMPLED_SHARE = 0.8, 0.5


def calibrated(bench: Bench, pair: Pair, table: CostTable) -> CostTable:
    """The table with its exit models and the overhead of a step; exits stay empty where too few drafts were seen."""
    prompts = bench_prompts(bench).token_ids
    jobs = draw_jobs(
        prompts,
        len(prompts),
        min_tokens=max_tokens(bench),
        max_tokens=max_tokens(bench),
        temperature=TEMPERATURE,
        sampled_share=SAMPLED_SHARE,
        seed=bench.options.seed,
    )
    policy = RecordingPolicy(min(NUM_DRAFT_TOKENS, pair.limits.max_draft_len))
    segments = pair.target.spec.segments
    boundaries = tuple(range(1, len(segments) - 1))
    with ExitStack() as stack:
        executor = stack.enter_context(pair.executor(policy))
        alone = drive(executor, closed_loop(jobs[:NUM_SINGLE], 1))
        step_ms = sum(outcome.step_ms for outcome in policy.outcomes)
        overhead_ms = max(0.0, (1e3 * alone.busy_s - step_ms) / max(1, len(policy.outcomes)))
        policy.boundaries = boundaries
        drive(executor, closed_loop(jobs, min(CONCURRENCY, pair.limits.max_batch_size)))
    seen = policy.observations()
    models, qualities = fit_exit_models(seen, boundaries, [segments[b] for b in boundaries])
    if models:
        models = judge(models, qualities, table, policy.num_draft_tokens, float(seen.accepted.mean()))
    bench.record.table(
        f"{pair.form}, early exits",
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
                any(model.boundary == q.boundary and model.pays for model in models),
            )
            for q in qualities
        ],
        f"{seen.accepted.size} tested drafts; precision: rejected of the dropped, recall: dropped of the rejected, on "
        "drafts that no fit saw. Empty: too few drafts to tell.",
    )
    bench.record.value(f"overhead_ms {pair.form}", overhead_ms)
    return dataclasses.replace(table, exits=tuple(models), overhead_ms=overhead_ms)
