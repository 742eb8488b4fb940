"""Open a pair on one GPU, for any decoder: partitions, modes, graphs and the rejection sampler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from faser_trtllm.core.cost_table import ALL
from faser_trtllm.engine.modes import Modes
from faser_trtllm.engine.opening import OpenedEngines, OpenRequest

if TYPE_CHECKING:
    from faser_trtllm.engine.gpu.device import Gpu
    from faser_trtllm.engine.gpu.engine import GpuEngine
    from faser_trtllm.engine.gpu.ops import Ops
    from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs
    from faser_trtllm.partition.green_context import GpuPartition

    OpenOne = Callable[[str, DeviceDraftProbs | None], tuple[GpuEngine, Ops]]

log = logging.getLogger(__name__)


def open_pair(request: OpenRequest, gpu: Gpu, stack: ExitStack, open_one: OpenOne) -> OpenedEngines:
    """Open the target and, if drafting, the draft, and capture their graphs. The stack closes them, but not the GPU.

    open_one(role, draft_probs): opens the "target" or the "draft", to be closed with the stack; GpuEngine documents
    draft_probs. Raises the errors of open_one, and FaserError if a driver call fails.
    """
    from faser_trtllm.engine.gpu.sampler.accept import GpuRejectionSampler

    limits, drafting = request.limits, request.drafting
    draft_probs = _draft_probs(request, gpu) if drafting and limits.max_draft_len else None
    target, ops = open_one("target", None)
    draft = open_one("draft", draft_probs)[0] if drafting else None
    sampler = GpuRejectionSampler(target, ops, limits.max_draft_len, draft_probs)
    overlaps = drafting and request.overlap
    _capture("target", target, (gpu.whole, gpu.pair.target) if overlaps else (gpu.whole,))
    if draft is not None:
        _capture("draft", draft, (gpu.whole, gpu.pair.draft) if overlaps else (gpu.whole,))
    partitions = {ALL: gpu.whole}
    if drafting:
        partitions |= {"draft": gpu.pair.draft, "verify": gpu.pair.target}
    enter_mode = Modes(target, draft, gpu.whole, lambda: (gpu.pair.target, gpu.pair.draft)).enter
    copy_kv = target.copy_kv if target.spec.max_num_branches else None
    return OpenedEngines(target, draft, enter_mode, sampler, partitions, copy_kv)


def open_draft_alone(request: OpenRequest, gpu: Gpu, open_one: OpenOne) -> GpuEngine:
    """Open only the draft, on its partition, for a target that another system runs. Raises the errors of open_pair."""
    draft, _ = open_one("draft", _draft_probs(request, gpu))
    _capture("draft", draft, (gpu.pair.draft,))
    draft.use(gpu.pair.draft)
    return draft


def _capture(role: str, engine: GpuEngine, partitions: tuple[GpuPartition, ...]) -> None:
    begun = time.monotonic()
    num_left_out, graphs = engine.capture_graphs(partitions), engine.graphs
    log.info(
        "%s: %d CUDA graphs captured in %.1f s, which take %.2f GiB",
        role,
        len(graphs),
        time.monotonic() - begun,
        graphs.num_bytes / (1 << 30),
    )
    if num_left_out:
        sizes = ", ".join(map(str, sorted(engine.sizes_without_graph)))
        log.warning(
            "%s: no memory was left for %d CUDA graphs; %s run without one, kernel by kernel",
            role,
            num_left_out,
            f"passes of {sizes} rows" if sizes else "draft steps",
        )


def _draft_probs(request: OpenRequest, gpu: Gpu) -> DeviceDraftProbs:
    from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs

    limits, vocab_size = request.limits, request.engines.vocab_size
    return DeviceDraftProbs(gpu.make_runtime(), gpu.whole, limits.max_batch_size, limits.max_draft_len, vocab_size)
