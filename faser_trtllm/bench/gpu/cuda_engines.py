"""The cuda engines of a pair whose weights are made in device memory, without files: a 32B target has 64 GB of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from faser_trtllm.bench.gpu.machine import Machine
from faser_trtllm.builder.cpu_engine import engine_model
from faser_trtllm.config import Quantization
from faser_trtllm.core.decision import Mode
from faser_trtllm.engine.cuda import CudaEngine
from faser_trtllm.engine.cuda_accept import DeviceAcceptor
from faser_trtllm.engine.cuda_draft import DraftLaws
from faser_trtllm.engine.cuda_limits import CudaLimits
from faser_trtllm.engine.cuda_ops import Ops, ReferenceOps
from faser_trtllm.engine.cuda_runtime import HostRuntime, Runtime
from faser_trtllm.engine.cuda_weights import DeviceWeights, LayerWeights
from faser_trtllm.executor.cuda_engines import CudaGpu
from faser_trtllm.executor.partitions_gpu import GpuModes
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.enlarge import EnlargedWeights
from faser_trtllm.models.rope import rope_frequencies
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows, quantize_rows
from faser_trtllm.partition.green_context import GpuPartition, PartitionPair

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TOKENS_PER_BLOCK = 32


@dataclass(frozen=True)
class PairLimits:
    """What the engines are opened for."""

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    max_draft_len: int = 8

    @property
    def num_blocks(self) -> int:
        return self.max_batch_size * -(-self.max_seq_len // TOKENS_PER_BLOCK)


@dataclass(frozen=True)
class PairEngines:
    """places: where an engine may run, by the cost tables' names: "all", and beside each other "verify" and "draft".

    enter_mode: called between steps when the mode changes. tester: the free test where the target's logits are.
    """

    target: CudaEngine
    draft: CudaEngine
    tester: DeviceAcceptor
    enter_mode: Callable[[Mode], None]
    places: Mapping[str, GpuPartition]


class DryGpu:
    """Stands in for executor.cuda_engines.CudaGpu on the CPU: partitions are names, kernels their references."""

    def __init__(self) -> None:
        self.whole = GpuPartition("whole", 0, 4)
        self.pair = PartitionPair(GpuPartition("draft 1:3", 0, 1), GpuPartition("target 1:3", 0, 3))

    def make_runtime(self) -> Runtime:
        return HostRuntime()

    def make_ops(self, runtime: Runtime, head_dim: int) -> Ops:
        return ReferenceOps()


def open_engines(
    machine: Machine,
    weights: list[EnlargedWeights],
    exit_layers: tuple[int, ...],
    limits: PairLimits,
    overlap: bool,
    stack: ExitStack,
    quantization: Quantization = Quantization.NONE,
) -> PairEngines:
    """weights: the target's and the draft's. overlap: capture graphs for all places, else for "all" only.

    quantization: of both models.
    """
    gpu: Any = stack.enter_context(CudaGpu()) if machine.is_gpu else DryGpu()
    target_weights, draft_weights = weights
    laws = DraftLaws(gpu.make_runtime(), limits.max_batch_size, limits.max_draft_len, target_weights.config.vocab_size)
    segments = (0, *exit_layers, target_weights.config.num_layers)
    target, ops = _open(gpu, target_weights, segments, limits, None, stack, quantization)
    whole = (0, draft_weights.config.num_layers)
    draft, _ = _open(gpu, draft_weights, whole, limits, laws, stack, quantization)
    tester = DeviceAcceptor(target, ops, limits.max_draft_len, laws)
    if machine.is_gpu:
        target.capture_graphs((gpu.whole, gpu.pair.target) if overlap else (gpu.whole,))
        draft.capture_graphs((gpu.whole, gpu.pair.draft) if overlap else (gpu.whole,))
    places = {"all": gpu.whole} | ({"verify": gpu.pair.target, "draft": gpu.pair.draft} if overlap else {})
    return PairEngines(target, draft, tester, GpuModes(gpu.whole, gpu.pair, target, draft).enter, places)


def _open(
    gpu: Any,
    made: EnlargedWeights,
    segments: tuple[int, ...],
    limits: PairLimits,
    laws: DraftLaws | None,
    stack: ExitStack,
    quantization: Quantization,
) -> tuple[CudaEngine, Ops]:
    runtime = gpu.make_runtime()
    ops = gpu.make_ops(runtime, made.config.head_dim)
    engine = CudaEngine(
        device_weights(made, limits.max_seq_len, runtime.device, quantization),
        segments,
        ops,
        runtime,
        gpu.whole,
        CudaLimits(
            num_blocks=limits.num_blocks,
            tokens_per_block=TOKENS_PER_BLOCK,
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            max_seq_len=limits.max_seq_len,
            max_logit_rows=limits.max_batch_size * (1 + limits.max_draft_len),
            max_draft_len=limits.max_draft_len if laws is not None else 0,
        ),
        laws=laws,
        keep_logits=laws is None,
    )
    return stack.enter_context(engine), ops


def device_weights(
    made: EnlargedWeights, max_seq_len: int, device: torch.device, quantization: Quantization = Quantization.NONE
) -> DeviceWeights:
    """As DeviceWeights.load of a bf16 engine file with these weights."""
    import torch

    config = made.config

    def fused(layer: str, *parts: str) -> Tensor:
        return torch.cat([made.tensor(f"{layer}.{part}.weight").to(device, torch.bfloat16) for part in parts])

    def matrix(layer: str, *parts: str) -> Tensor | ScaledRows:
        whole = fused(layer, *parts)
        return quantize_rows(whole) if quantization is Quantization.FP8 else whole

    layers = []
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        layers.append(
            LayerWeights(
                input_norm=fused(layer, "input_layernorm"),
                qkv=matrix(layer, *(f"self_attn.{name}_proj" for name in "qkv")),
                o=matrix(layer, "self_attn.o_proj"),
                post_norm=fused(layer, "post_attention_layernorm"),
                gate_up=matrix(layer, "mlp.gate_proj", "mlp.up_proj"),
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
