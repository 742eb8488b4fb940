"""cuda engines of a pair whose weights are generated in device memory without files, since a 32B target has 64 GB."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.dry_gpu import DryGpu
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models.enlarge import EnlargedWeights
from faser_trtllm.builder.cpu_engine import engine_model
from faser_trtllm.config import Quantization
from faser_trtllm.core.cost_table import ALL
from faser_trtllm.engine.cuda.engine import make_engine
from faser_trtllm.engine.cuda.weights import DeviceWeights, LayerWeights
from faser_trtllm.engine.gpu.decoder import Placement
from faser_trtllm.engine.gpu.device import CudaGpu, Gpu
from faser_trtllm.engine.gpu.engine import GpuEngine
from faser_trtllm.engine.gpu.limits import GpuLimits
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.sampler.accept import GpuRejectionSampler
from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs
from faser_trtllm.engine.modes import Modes
from faser_trtllm.engine.opening import OpenedEngines
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.rope import rope_frequencies
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows, quantize_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TOKENS_PER_BLOCK = 32


@dataclass(frozen=True)
class PairLimits:
    """Limits that the engines are opened with."""

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    max_draft_len: int = 8

    @property
    def num_blocks(self) -> int:
        return self.max_batch_size * -(-self.max_seq_len // TOKENS_PER_BLOCK)


def open_engines(
    machine: Machine,
    weights: list[EnlargedWeights],
    exit_layers: tuple[int, ...],
    limits: PairLimits,
    overlap: bool,
    stack: ExitStack,
    quantization: Quantization = Quantization.NONE,
    deterministic: bool = False,
) -> OpenedEngines:
    """Open engines of the target, which may be deterministic, and the draft. overlap: capture graphs for all partitions
    instead of only "all"."""
    gpu: Gpu = stack.enter_context(CudaGpu()) if machine.is_gpu else DryGpu()
    target_weights, draft_weights = weights
    vocab_size = target_weights.config.vocab_size
    draft_probs = DeviceDraftProbs(
        gpu.make_runtime(), gpu.whole, limits.max_batch_size, limits.max_draft_len, vocab_size
    )
    segments = (0, *exit_layers, target_weights.config.num_layers)
    target, ops = _open(gpu, target_weights, segments, limits, None, stack, quantization, deterministic)
    whole = (0, draft_weights.config.num_layers)
    draft, _ = _open(gpu, draft_weights, whole, limits, draft_probs, stack, quantization)
    sampler = GpuRejectionSampler(target, ops, limits.max_draft_len, draft_probs)
    if machine.is_gpu:
        target.capture_graphs((gpu.whole, gpu.pair.target) if overlap else (gpu.whole,))
        draft.capture_graphs((gpu.whole, gpu.pair.draft) if overlap else (gpu.whole,))
    partitions = {ALL: gpu.whole} | ({"verify": gpu.pair.target, "draft": gpu.pair.draft} if overlap else {})
    modes = Modes(target, draft, gpu.whole, lambda: (gpu.pair.target, gpu.pair.draft))
    return OpenedEngines(target, draft, modes.enter, sampler, partitions)


def _open(
    gpu: Gpu,
    made: EnlargedWeights,
    segments: tuple[int, ...],
    limits: PairLimits,
    draft_probs: DeviceDraftProbs | None,
    stack: ExitStack,
    quantization: Quantization,
    deterministic: bool = False,
) -> tuple[GpuEngine, Ops]:
    runtime = gpu.make_runtime()
    ops = gpu.make_ops(runtime, made.config.head_dim, deterministic)
    engine = make_engine(
        device_weights(made, limits.max_seq_len, runtime.device, quantization),
        segments,
        Placement(ops, runtime, gpu.whole),
        GpuLimits(
            num_blocks=limits.num_blocks,
            tokens_per_block=TOKENS_PER_BLOCK,
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            max_seq_len=limits.max_seq_len,
            max_logit_rows=limits.max_batch_size * (1 + limits.max_draft_len),
            max_draft_len=limits.max_draft_len if draft_probs is not None else 0,
        ),
        draft_probs=draft_probs,
    )
    return stack.enter_context(engine), ops


def device_weights(
    made: EnlargedWeights, max_seq_len: int, device: torch.device, quantization: Quantization = Quantization.NONE
) -> DeviceWeights:
    """Return weights equivalent to DeviceWeights.load of a bf16 engine file."""
    import torch

    config = made.config

    def fused(layer: str, *parts: str) -> Tensor:
        return torch.cat([made.tensor(f"{layer}.{part}.weight").to(device, torch.bfloat16) for part in parts])

    def matrix(layer: str, *parts: str, norm: str = "") -> Tensor | ScaledRows:
        whole = fused(layer, *parts)
        if norm:
            whole.mul_(fused(layer, norm))
        return quantize_rows(whole) if quantization is Quantization.FP8 else whole

    layers = []
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        layers.append(
            LayerWeights(
                qkv=matrix(layer, *(f"self_attn.{name}_proj" for name in "qkv"), norm="input_layernorm"),
                o=matrix(layer, "self_attn.o_proj"),
                gate_up=matrix(layer, "mlp.gate_proj", "mlp.up_proj", norm="post_attention_layernorm"),
                down=matrix(layer, "mlp.down_proj"),
            )
        )
    inv_freq, factor = rope_frequencies(config.rope, config.head_dim)
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), torch.from_numpy(inv_freq))
    return DeviceWeights(
        _sizes(config, max_seq_len),
        fused("model", "embed_tokens"),
        tuple(layers),
        fused("model", "norm"),
        made.tensor("lm_head.weight").to(device, torch.bfloat16),
        (angles.cos() * factor).to(device),
        (angles.sin() * factor).to(device),
    )


def _sizes(config: ModelConfig, max_seq_len: int) -> dict[str, Any]:
    flags = {name: getattr(config, name) for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")}
    return engine_model(config, max_seq_len) | flags
