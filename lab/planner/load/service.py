"""An executor with the real scheduler and policy on synthetic engines, whose time follows a cost table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from faser_trtllm.config import ExecutorConfig, KvCacheConfig
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.decision import Mode
from faser_trtllm.core.plan import SchedulerOutput
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.opening import stay
from faser_trtllm.executor.draft_worker import DraftStage, DraftWorker
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import assemble
from faser_trtllm.policy.base import Policy
from faser_trtllm.policy.registry import make_policy
from lab.clock import ManualClock
from lab.planner.load.acceptance import Acceptance, AcceptanceProcess
from lab.planner.load.synthetic_engines import (
    VOCAB_SIZE,
    DoubtRates,
    PendingDrafts,
    SyntheticDraft,
    SyntheticSampler,
    SyntheticTarget,
)
from lab.simulation.draft_worker import SimulatedDraftWorker
from lab.simulation.priced_engine import PricedEngine

TOKENS_PER_BLOCK = 32


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a synthetic service. kv_tokens: size of the KV cache; None: enough for every request.

    believed: the policy's cost table, if it differs from the one that time follows.
    """

    speculation: str
    costs: CostTable
    acceptance: Acceptance
    max_batch_size: int = 256
    max_num_tokens: int = 2048
    max_prompt_len: int = 4096
    max_output_len: int = 1024
    max_draft_len: int = 8
    kv_tokens: int | None = None
    seed: int = 0
    max_queue_size: int = 10_000_000
    believed: CostTable | None = field(default=None)


def open_service(
    options: ServiceOptions, clock: ManualClock, wrap_policy: Callable[[Policy], Policy] = lambda policy: policy
) -> Executor:
    """Open the service. Request ids must be integers, since acceptance is a function of id and seed."""
    longest = options.max_prompt_len + options.max_output_len
    max_draft_len = options.max_draft_len
    kv_tokens = options.max_batch_size * (longest + max_draft_len) if options.kv_tokens is None else options.kv_tokens
    segments = (0, 1, 2) if options.costs.num_segments else (0, 2)
    spec = EngineSpec(
        vocab_size=VOCAB_SIZE,
        max_seq_len=longest,
        num_layers=2,
        num_blocks=max(kv_tokens, longest + max_draft_len) // TOKENS_PER_BLOCK + 1,
        tokens_per_block=TOKENS_PER_BLOCK,
        max_num_tokens=options.max_num_tokens,
        max_batch_size=options.max_batch_size,
        segments=segments,
    )
    draft_spec = replace(spec, block_size=1 + max_draft_len) if options.costs.has("draft_block") else spec
    process = AcceptanceProcess(
        options.acceptance, options.max_batch_size, options.max_output_len, max_draft_len, options.seed
    )
    drafts = PendingDrafts(process, options.max_batch_size, max_draft_len)
    costs = options.costs
    doubts = DoubtRates.of(costs.exits[0]) if costs.exits else None
    target = PricedEngine(SyntheticTarget(spec, drafts, doubts, options.seed, costs.routing), costs, clock, "target")
    policy = wrap_policy(
        make_policy(options.speculation, max_draft_len, options.believed or costs, options.max_batch_size)
    )
    engines = {"target": target}
    if policy.name != "off":
        engines["draft"] = target.draft_engine = PricedEngine(SyntheticDraft(draft_spec, drafts), costs, clock, "draft")

    def host_ms(plan: SchedulerOutput) -> float:
        """Return the host's time; also begin acceptance of requests with new slots."""
        for request in plan.admitted:
            process.begin(request.slot, int(request.request_id), request.max_num_tokens - request.prompt_len)
        return costs.overhead_ms

    def make_worker(stage: DraftStage, enter_mode: Callable[[Mode], None]) -> DraftWorker:
        return SimulatedDraftWorker(stage, engines, costs, clock, host_ms)

    return assemble(
        target,
        engines.get("draft"),
        policy,
        ExecutorConfig(kv_cache_config=KvCacheConfig(enable_block_reuse=False), max_queue_size=options.max_queue_size),
        max_seq_len=longest,
        max_draft_len=max_draft_len if "draft" in engines else 0,
        clock=clock,
        enter_mode=stay,
        make_worker=make_worker,
        sampler=SyntheticSampler(drafts, max_draft_len),
    )
