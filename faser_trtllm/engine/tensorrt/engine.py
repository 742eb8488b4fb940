"""Open one TensorRT engine file: the GPU engine over its plans. Not run on a GPU."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from faser_trtllm.builder.plan_file import PlanFile
from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
from faser_trtllm.engine.gpu.decoder import Placement
from faser_trtllm.engine.gpu.engine import GpuEngine
from faser_trtllm.engine.gpu.limits import GpuLimits
from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs
from faser_trtllm.engine.tensorrt.decoder import PlanDecoder
from faser_trtllm.engine.tensorrt.plans import Plans, check_requirements
from faser_trtllm.errors import ConfigError


def open_engine(
    path: Path,
    trt: Any,
    place: Placement,
    compute_capability: str,
    limits: GpuLimits,
    *,
    draft_probs: DeviceDraftProbs | None = None,
    cache_dir: Path | None = None,
    hidden_rows: HiddenRows | None = None,
) -> GpuEngine:
    """Deserialize an engine file and allocate its KV memory, inputs and outputs; for other options see GpuEngine.

    limits: at most those that the file was built for; linear caches always have the number of blocks they were built
    with. hidden_rows: rows kept for a head. Raises EngineFileError if the file does not fit this GPU or this TensorRT,
    ConfigError for invalid limits.
    """
    with ExitStack() as guard:
        file = guard.enter_context(PlanFile.open(path))
        check_requirements(file.label, file.requirements, trt, compute_capability)
        built, segments = file.network, file.segments
        for name in ("max_batch_size", "max_num_tokens", "max_seq_len"):
            value = getattr(limits, name)
            if not 1 <= value <= getattr(built, name):
                raise ConfigError(f"{name} is {value}, {file.label} was built for 1 to {getattr(built, name)}")
        limits = replace(limits, tokens_per_block=built.tokens_per_block)
        if segments[0].info.flavour == "native":
            limits = replace(limits, num_blocks=built.max_batch_size)
        (logits,) = (spec for spec in segments[-1].info.outputs if spec.name == "logits")
        sizes = {
            "vocab_size": int(logits.shape[1]),
            "num_layers": segments[-1].info.last,
            "max_seq_len": built.max_seq_len,
        }
        spec = limits.spec(sizes, (0, *(plan.info.last for plan in segments)))
        plans = Plans(trt, file, compute_capability, place.runtime.device, cache_dir)
        guard.callback(plans.close)
        max_logit_rows = max(limits.max_logit_rows, limits.max_batch_size)
        decoder = PlanDecoder(file, plans, place, spec, max_logit_rows, hidden_rows)
        engine = GpuEngine(decoder, spec, place, limits, draft_probs=draft_probs)
        guard.pop_all()
        return engine
