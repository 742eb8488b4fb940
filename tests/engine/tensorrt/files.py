"""Engine files of a tiny model in four layers, of the builder's networks, opened over the stand-in of TensorRT."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu.dry_gpu import HostRuntime
from benchmarks.gpu.reference_ops import ReferenceOps
from faser_trtllm.builder.network.early_exit import build_early_exit
from faser_trtllm.builder.network.segment import build_segment, create_network
from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
from faser_trtllm.engine.gpu.decoder import Placement
from faser_trtllm.engine.gpu.engine import GpuEngine
from faser_trtllm.engine.gpu.limits import GpuLimits
from faser_trtllm.engine.tensorrt.engine import open_engine as open_file
from faser_trtllm.partition.green_context import GpuPartition
from tests.engine.tensorrt.stand_in import CAPABILITY, StandIn
from tests.support.networks import load_trt, new_builder, options
from tests.support.plugin_stand_in import StandInNetwork
from tests.support.plugin_stand_in import StandInTrt as PluginTrt

trt = load_trt()
SEGMENTS = (0, 1, 3, 4)
WHOLE = GpuPartition("whole", 1, 132)
BLOCK = 16


def make_networks(model: Any, flavour: str, segments: tuple[int, ...], **changes: Any) -> Any:
    """Return networks with their plugin nodes, and the options."""
    block = BLOCK if flavour == "plugin" else 96
    built = options(**({"tokens_per_block": block, "profile_rows": (24,)} | changes))
    config = model[0]
    networks = []
    for first, last in pairwise(segments):
        network: Any = create_network(trt, new_builder(trt))
        if flavour == "plugin":
            network = StandInNetwork(network, config.num_heads, trt)
            segment = build_segment(PluginTrt(trt), network, *model, first, last, built)
            networks.append((segment, network.plugin_nodes()))
        else:
            networks.append((build_segment(trt, network, *model, first, last, built), ()))
    if len(segments) > 2:
        network = create_network(trt, new_builder(trt))
        if flavour == "plugin":
            network = StandInNetwork(network, config.num_heads, trt)
            networks.append((build_early_exit(PluginTrt(trt), network, *model, built), network.plugin_nodes()))
        else:
            networks.append((build_early_exit(trt, network, *model, built), ()))
    return networks, built


def open_engine(
    stand_in: StandIn,
    capability: str = CAPABILITY,
    cache_dir: Path | None = None,
    hidden_rows: HiddenRows | None = None,
    **changes: Any,
) -> GpuEngine:
    limits = {
        "num_blocks": 4 * 96 // BLOCK,
        "tokens_per_block": BLOCK,
        "max_batch_size": 4,
        "max_num_tokens": 64,
        "max_seq_len": 96,
        "max_logit_rows": 64,
    } | changes
    return open_file(
        stand_in.path,
        stand_in.trt,
        Placement(ReferenceOps(), HostRuntime(), WHOLE),
        capability,
        GpuLimits(**limits),
        cache_dir=cache_dir,
        hidden_rows=hidden_rows,
    )
