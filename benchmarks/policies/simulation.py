"""Open an executor with real engines and simulated time from a cost table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.decision import Mode
from faser_trtllm.engine.base import Engine
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.draft_worker import DraftStage, DraftWorker
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import Simulation, open_executor
from faser_trtllm.policy.base import Policy
from lab.clock import ManualClock
from lab.simulation.draft_worker import SimulatedDraftWorker
from lab.simulation.priced_engine import PricedEngine


def open_simulation(
    engine_dir: Path,
    config: ExecutorConfig,
    costs: CostTable,
    clock: ManualClock,
    wrap_policy: Callable[[Policy], Policy] = lambda policy: policy,
    believed: CostTable | None = None,
    wrap_engine: Callable[[Engine, str], Engine] = lambda engine, role: engine,
) -> Executor:
    """Open an executor whose tokens and confidences come from engines and whose time is simulated and reproducible.

    costs: a table of any machine with the engine's segments; the host's time per step is its overhead, whatever the
    policy. believed: the policy's table, if it differs. wrap_engine: wraps an engine below its simulated costs.
    """

    engines: dict[str, PricedEngine] = {}

    def price(engine: Engine, role: str) -> Engine:
        num_segments = len(engine.spec.segments) - 1
        if role == "target" and costs.num_segments not in (0, num_segments):
            raise ConfigError(
                f"the cost table has {costs.num_segments} segments, the target engine {num_segments}; build it with as "
                "many --exit_layers as the engine had that was profiled"
            )
        engines[role] = PricedEngine(wrap_engine(engine, role), costs, clock, role)
        if len(engines) == 2:
            engines["target"].draft_engine = engines["draft"]
        return engines[role]

    def make_worker(stage: DraftStage, enter_mode: Callable[[Mode], None]) -> DraftWorker:
        return SimulatedDraftWorker(stage, engines, costs, clock, lambda plan: costs.overhead_ms)

    return open_executor(engine_dir, config, clock, wrap_policy, Simulation(price, make_worker, believed or costs))
