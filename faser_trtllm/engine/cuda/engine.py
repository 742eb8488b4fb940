"""Make the cuda backend's engines: a GpuEngine over a model's layers or over a draft head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from faser_trtllm.builder.cuda_engine_file import CudaFile
from faser_trtllm.builder.shard import Shard
from faser_trtllm.config import KvCacheDtype, Quantization
from faser_trtllm.engine.cuda.block import BlockDecoder
from faser_trtllm.engine.cuda.decoder import TorchDecoder
from faser_trtllm.engine.cuda.eagle3 import Eagle3Decoder
from faser_trtllm.engine.cuda.experts import ExpertsDecoder
from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
from faser_trtllm.engine.cuda.medusa import MedusaDecoder, MedusaWeights
from faser_trtllm.engine.cuda.mtp import MtpDecoder
from faser_trtllm.engine.cuda.parallel.decoder import ShardDecoder
from faser_trtllm.engine.cuda.parallel.leader import LeadingEngine
from faser_trtllm.engine.cuda.parallel.ranks import Membership
from faser_trtllm.engine.cuda.weights import WHOLE, BlockWeights, DeviceWeights, MtpWeights
from faser_trtllm.engine.gpu.decoder import Decoder, Placement
from faser_trtllm.engine.gpu.engine import GpuEngine
from faser_trtllm.engine.gpu.graphs import GraphStore
from faser_trtllm.engine.gpu.limits import GpuLimits
from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs
from faser_trtllm.errors import ConfigError

if TYPE_CHECKING:
    import torch


def load_weights(
    file: CudaFile,
    device: torch.device,
    dtype: torch.dtype | None = None,
    quantization: Quantization = Quantization.NONE,
    shard: Shard = WHOLE,
) -> DeviceWeights | MedusaWeights:
    """Load the weights of any cuda engine file; see DeviceWeights.load. Medusa heads are never quantized."""
    if "medusa" in file.model:
        return MedusaWeights.load(file, device, dtype)
    return DeviceWeights.load(file, device, dtype, quantization, shard)


def make_engine(
    weights: DeviceWeights | MedusaWeights,
    segments: tuple[int, ...],
    place: Placement,
    limits: GpuLimits,
    *,
    draft_probs: DeviceDraftProbs | None = None,
    hidden_rows: HiddenRows | None = None,
    kv_dtype: KvCacheDtype = KvCacheDtype.AUTO,
    membership: Membership | None = None,
) -> GpuEngine:
    """Make an engine over weights on the place's device, which the caller owns; for other options see GpuEngine.

    hidden_rows: memory that a target writes and a head reads. membership: this rank of a target split over GPUs.
    Raises ConfigError for limits that the weights cannot meet.
    """
    import torch

    if limits.tokens_per_block < 16 or limits.tokens_per_block % 16:
        raise ConfigError(f"tokens_per_block is {limits.tokens_per_block}; it must be a multiple of 16")
    spec = limits.spec(weights.sizes, segments)
    kv_type = torch.float8_e4m3fn if kv_dtype is KvCacheDtype.FP8 else None
    options: dict[str, Any] = {"draft_probs": draft_probs}
    decoder: Decoder
    if isinstance(weights, MedusaWeights):
        assert hidden_rows is not None, "heads read their target's hidden rows"
        decoder = MedusaDecoder(weights, spec, place, hidden_rows)
    elif isinstance(weights.head, BlockWeights):
        assert hidden_rows is not None, "a block drafter reads its target's hidden rows"
        decoder = BlockDecoder(weights, spec, place, hidden_rows, limits.max_draft_len, kv_type)
    elif membership is None:
        kind = TorchDecoder if weights.head is None else Eagle3Decoder
        if isinstance(weights.head, MtpWeights):
            kind = MtpDecoder
        elif "experts" in weights.sizes:
            kind = ExpertsDecoder
        decoder = kind(weights, spec, place, hidden_rows, kv_type)
    else:
        decoder = ShardDecoder(weights, spec, place, hidden_rows, kv_type, membership.group)
        options["graphs"] = GraphStore(place.runtime, limits.graph_bytes, membership.group.least)
        if membership.ranks is not None:
            return LeadingEngine(decoder, spec, place, limits, ranks=membership.ranks, **options)
    return GpuEngine(decoder, spec, place, limits, **options)
