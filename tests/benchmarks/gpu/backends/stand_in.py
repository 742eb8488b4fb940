"""Runs what the real builder of TensorRT for RTX wrote: the directory's plans, interpreted on the CPU."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.builder.network.early_exit import build_early_exit
from faser_trtllm.builder.network.segment import build_segment, create_network, logger
from faser_trtllm.builder.plan_file import EARLY_EXIT, PlanFile, PlanInfo
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.weights import CheckpointWeights
from lab.interpreted.interpreter import Interpreter
from tests.engine.tensorrt.stand_in import StandInTrt


def stand_in_of(trt: Any, engines: EngineDir, target: Path, draft: Path, stack: ExitStack) -> StandInTrt:
    """The module to open the directory with. target, draft: the checkpoints that it was built from."""
    interpreters: dict[bytes, tuple[PlanInfo, Interpreter]] = {}
    for path, checkpoint in ((engines.target_path, target), (engines.draft_path, draft)):
        config, weights = load_model_config(checkpoint), stack.enter_context(CheckpointWeights(checkpoint))
        with PlanFile.open(path) as file:
            for plan in file.plans:
                network = create_network(trt, trt.Builder(logger(trt)))
                if plan.info.kind == EARLY_EXIT:
                    made = build_early_exit(trt, network, config, weights, file.network)
                else:
                    layers = plan.info.first, plan.info.last
                    made = build_segment(trt, network, config, weights, *layers, file.network)
                with file.view(plan) as view:
                    written = bytes(view)
                interpreters[written] = plan.info, Interpreter(trt, made.network, made.weights, ())
    return StandInTrt(trt, interpreters.get)
