"""Opens an executor whose engines compute for real and whose time is a cost table's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.clock import ManualClock
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.decision import Mode
from faser_trtllm.engine.base import Engine
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import Simulation, open_executor
from faser_trtllm.executor.lanes import DraftLane, DraftStage
from faser_trtllm.policy.base import Policy
from faser_trtllm.sim.lanes import SimulatedLane
from faser_trtllm.sim.priced_engine import PricedEngine
from faser_trtllm.sim.priced_policy import PricedPolicy


def open_simulation(
    engine_dir: Path,
    config: ExecutorConfig,
    costs: CostTable,
    clock: ManualClock,
    wrap_policy: Callable[[Policy], Policy] = lambda policy: policy,
    believed: CostTable | None = None,
) -> Executor:
    """Tokens, drafts and confidences are the engines' own; only time is simulated, so a run repeats itself exactly.

    costs need not be this machine's: any table with the engine's segments will do. What is left out: the host's time
    per step is the table's overhead, the same for every policy.
    believed: the table that the policy goes by, where it is not the one that time follows: how a policy does with a
    profile that is wrong.
    """

    engines: dict[str, PricedEngine] = {}

    def price(engine: Engine, role: str) -> Engine:
        num_segments = len(engine.spec.segments) - 1
        if role == "target" and costs.num_segments not in (0, num_segments):
            raise ConfigError(
                f"the cost table has {costs.num_segments} segments, the target engine {num_segments}; build it with as "
                "many --exit_layers as the engine had that was profiled"
            )
        engines[role] = PricedEngine(engine, costs, clock)
        if len(engines) == 2:
            engines["target"].draft_engine = engines["draft"]
        return engines[role]

    def make_lane(stage: DraftStage, enter_mode: Callable[[Mode], None]) -> DraftLane:
        return (
            SimulatedLane(stage, lambda mode: None, engines, costs, clock) if "draft" in engines else DraftLane(stage)
        )

    def charge(policy: Policy) -> Policy:
        return PricedPolicy(wrap_policy(policy), clock, costs.overhead_ms)

    return open_executor(engine_dir, config, clock, charge, Simulation(price, make_lane, believed or costs))
