"""Open the engines of a cuda engine directory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from faser_trtllm.builder.shard import Shard
from faser_trtllm.config import Quantization
from faser_trtllm.engine.cuda.parallel.group import RankGroup
from faser_trtllm.engine.cuda.parallel.ranks import Membership, Ranks
from faser_trtllm.engine.gpu.device import CudaGpu, Gpu
from faser_trtllm.engine.gpu.memory import fit_blocks
from faser_trtllm.engine.gpu.open import open_draft_alone, open_pair
from faser_trtllm.engine.opening import OpenedEngines, OpenRequest
from faser_trtllm.errors import ConfigError

_HEADS = {
    "eagle3": "an EAGLE-3 head, which runs",
    "medusa": "Medusa heads, which run",
    "mtp": "an MTP layer, which runs",
    "block": "a block drafter, which runs",
}

if TYPE_CHECKING:
    from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
    from faser_trtllm.engine.gpu.engine import GpuEngine
    from faser_trtllm.engine.gpu.ops import Ops
    from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs


def open_engines(request: OpenRequest, stack: ExitStack) -> OpenedEngines:
    return open_cuda_engines(request, stack.enter_context(CudaGpu(plain_streams=request.plain_streams)), stack)


def open_draft(request: OpenRequest, stack: ExitStack) -> GpuEngine:
    return open_cuda_draft(request, stack.enter_context(CudaGpu(request.ordinal)), stack)


def open_cuda_engines(request: OpenRequest, gpu: Gpu, stack: ExitStack) -> OpenedEngines:
    """Open the engines on a GPU; see open_pair.

    Raises EngineFileError for unusable files, ConfigError for invalid limits, for too little memory and for products
    that the GPU does not support, FaserError if a driver call fails.
    """
    shard = Shard(0, request.engines.tp_size)
    if request.num_branches and shard.size > 1:
        raise ConfigError(
            f"num_branches is {request.num_branches}, and the target of {request.engines.path} is split over "
            f"{shard.size} GPUs, which run chains only; set it to 0 or build with --tp_size 1"
        )
    num_blocks, membership = blocks_of(request, gpu, shard), None
    if shard.size > 1:
        ranks = stack.enter_context(Ranks(request, gpu))
        num_blocks = min(num_blocks, ranks.num_blocks)
        ranks.open(num_blocks)
        membership = Membership(stack.enter_context(_join(shard, ranks.directory, gpu)), ranks)
    request = replace(request, num_blocks=num_blocks)
    hidden_rows = open_hidden_rows(request, gpu)

    def open_one(role: str, draft_probs: DeviceDraftProbs | None) -> tuple[GpuEngine, Ops]:
        if role == "draft":  # whole, on rank 0
            return open_cuda_draft_file(request, gpu, stack, hidden_rows, draft_probs)
        return _open(request, gpu, stack, role, hidden_rows, membership=membership)

    return open_pair(request, gpu, stack, open_one)


def blocks_of(request: OpenRequest, gpu: Gpu, shard: Shard) -> int:
    """Return the number of KV blocks that a rank has room for; see fit_blocks. Rank 0 also holds the draft."""
    from faser_trtllm.engine.cuda.memory import weight_bytes

    shards = {"target": shard, "draft": Shard()}
    weights = {role: weight_bytes(path, request.quantization, shards[role]) for role, path in request.paths.items()}
    return fit_blocks(request, weights, gpu.free_bytes(), head_buffers(request) | expert_buffers(request))


def expert_buffers(request: OpenRequest) -> dict[str, int]:
    """Return, by name, the bytes that mixtures of experts allocate in their largest pass."""
    from faser_trtllm.engine.cuda.memory import pair_bytes

    sizes = {role: pair_bytes(path, request.limits.max_num_tokens) for role, path in request.paths.items()}
    return {f"rows of the {role}'s experts": size for role, size in sizes.items() if size}


def head_buffers(request: OpenRequest) -> dict[str, int]:
    """Return, by name, the bytes that a head needs in addition to its weights and KV."""
    from faser_trtllm.engine.cuda.memory import block_bytes, place_logits_bytes

    if not request.drafting:
        return {}
    if request.engines.draft_head == "medusa":
        return {"logits of the Medusa heads": place_logits_bytes(request.paths["draft"], request.limits.max_batch_size)}
    if request.engines.draft_head == "block":
        return block_bytes(request.paths["draft"], request.limits, request.kv_dtype)
    return {}


def open_follower(request: OpenRequest, gpu: Gpu, stack: ExitStack, shard: Shard, directory: Path) -> GpuEngine:
    """Open a later rank's part of the target; raises the same errors as open_cuda_engines."""
    membership = Membership(stack.enter_context(_join(shard, directory, gpu)))
    return _open(request, gpu, stack, "target", None, membership=membership)[0]


def _join(shard: Shard, directory: Path, gpu: Gpu) -> RankGroup:
    return RankGroup(shard, directory, gpu.collectives, gpu.make_runtime().device)


def open_cuda_draft(request: OpenRequest, gpu: Gpu, stack: ExitStack) -> GpuEngine:
    """Open a draft model without its target; see open_draft_alone."""
    return open_draft_alone(request, gpu, lambda role, probs: open_cuda_draft_file(request, gpu, stack, None, probs))


def open_hidden_rows(request: OpenRequest, gpu: Gpu) -> HiddenRows | None:
    """Allocate memory for the target's hidden rows that a head reads, for any GPU backend; None without a head. Raises
    ConfigError if quantization is requested, which heads do not support."""
    import torch

    from faser_trtllm.engine.cuda.hidden_rows import HiddenRows

    kind = request.engines.draft_head
    if kind is None or not request.drafting:
        return None
    if request.quantization is not Quantization.NONE:
        raise ConfigError(
            f"quantization is {request.quantization.value}, but {request.engines.path} drafts with {_HEADS[kind]} in "
            "the dtype of the build; set quantization to none"
        )
    target = request.engines.target_config["pretrained_config"]
    return HiddenRows(
        gpu.make_runtime(),
        request.engines.read_layers,
        target["hidden_size"],
        gpu.weights_dtype or getattr(torch, target["dtype"]),
        num_blocks=request.num_blocks + request.num_branches * request.limits.max_batch_size,
        tokens_per_block=request.limits.tokens_per_block,
    )


def open_cuda_draft_file(
    request: OpenRequest,
    gpu: Gpu,
    stack: ExitStack,
    hidden_rows: HiddenRows | None,
    draft_probs: DeviceDraftProbs | None,
) -> tuple[GpuEngine, Ops]:
    """Open a directory's draft, a cuda engine file; the stack closes it. hidden_rows: the target's, for a head."""
    return _open(request, gpu, stack, "draft", hidden_rows, draft_probs)


def _open(
    request: OpenRequest,
    gpu: Gpu,
    stack: ExitStack,
    role: str,
    hidden_rows: HiddenRows | None,
    draft_probs: DeviceDraftProbs | None = None,
    membership: Membership | None = None,
) -> tuple[GpuEngine, Ops]:
    from faser_trtllm.builder.cuda_engine_file import CudaFile
    from faser_trtllm.engine.cuda.engine import load_weights, make_engine
    from faser_trtllm.engine.cuda.experts import check_mixture
    from faser_trtllm.engine.gpu.decoder import Placement
    from faser_trtllm.engine.gpu.limits import GpuLimits

    engines, runtime = request.engines, gpu.make_runtime()
    shard = Shard() if membership is None else membership.group.shard
    with CudaFile.open(engines.target_path if role == "target" else engines.draft_path) as file:
        deterministic = request.deterministic and role == "target"  # drafts are proposals: they need no exact bits
        has_mxfp4 = "expert_quantization" in file.model
        ops = gpu.make_ops(runtime, file.model["head_dim"], deterministic, has_mxfp4)
        gpu.check_quantization(runtime, request.quantization)
        if "experts" in file.model:
            check_mixture(str(engines.path), request.quantization)
        weights = load_weights(file, runtime.device, gpu.weights_dtype, request.quantization, shard)
        segments = file.segments
    limits = GpuLimits.of(
        request.limits, request.num_blocks, has_drafts=role == "draft", num_branches=request.num_branches
    )
    engine = make_engine(
        weights,
        segments,
        Placement(ops, runtime, gpu.whole),
        limits,
        draft_probs=draft_probs,
        hidden_rows=hidden_rows,
        kv_dtype=request.kv_dtype,
        membership=membership,
    )
    return stack.enter_context(engine), ops
