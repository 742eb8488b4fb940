"""Cuda engines of tiny checkpoints on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.dry_gpu import HostRuntime
from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.cuda_engine_file import CudaFile
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import KvCacheDtype, Quantization
from faser_trtllm.engine.cuda.engine import make_engine
from faser_trtllm.engine.cuda.weights import DeviceWeights
from faser_trtllm.engine.gpu.decoder import Placement
from faser_trtllm.engine.gpu.limits import GpuLimits
from faser_trtllm.models.checkpoint.open import open_checkpoint
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.partition.green_context import GpuPartition
from tests.engine.cuda.exact_ops import ExactOps
from tests.ops.cuda.emulation import emulated
from tests.support.block_drafter import make_block_drafter
from tests.support.checkpoints import make_checkpoint, make_pair
from tests.support.eagle3 import make_head
from tests.support.medusa import make_medusa
from tests.support.moe_checkpoints import make_moe_pair
from tests.support.mtp import make_mimo

WHOLE = GpuPartition("whole", 1, 132)
MAX_BATCH_SIZE = 6
HEADS = {  # options of build_with_head
    "eagle3": {"make": make_head, "layers": (1, 2, 4), "draft_vocab_size": 200},
    "eagle31": {
        "make": make_head,
        "layers": (1, 2, 4),
        "draft_vocab_size": 200,
        "num_layers": 2,
        "qk_norm": True,
        "fc_norm": True,
        "norm_output": True,
        "eagle3_norm_output": "fed",
    },
    "medusa": {"make": make_medusa, "num_heads": 5, "num_layers": 2},
    "mtp": {"make": None},
    "dflash": {"make": make_block_drafter, "layers": (1, 4), "block_size": 5, "windows": (0, 16)},
    "dspark": {"make": make_block_drafter, "layout": "dspark", "layers": (0, 2, 3), "block_size": 4},
    "dflash2": {
        "make": make_block_drafter,
        "layout": "dflash2",
        "layers": (1, 4),
        "windows": (12, 12),
        # With fewer tokens, a random drafter's seeded draws are never the target's.
        "block": {"selector_top_k": 250, "output_multiplier": 0.1},
    },
}


class SmallBlocks:
    """Rows of logits by 64 threads, which the emulator runs quickly."""

    def __init__(self, module) -> None:
        self._module = module

    def launch(self, kernel, grid, block, arguments, stream=0) -> None:
        block = (64, 1, 1) if kernel.startswith(("accept_rows", "sample_rows")) else block
        self._module.launch(kernel, grid, block, arguments, stream)


def emulated_rows(stem: str) -> SmallBlocks:
    """accept or sample."""
    return SmallBlocks(emulated(stem, {"FASER_BLOCK_THREADS": 64}))


def build_pair(
    directory: Path,
    dtype: str = "bfloat16",
    exit_layers: tuple[int, ...] = (),
    max_seq_len: int = 256,
    tp_size: int = 1,
    **options,
) -> EngineDir:
    """A random pair of tiny models with 64-wide heads, built for the cuda backend."""
    sizes = {"num_layers": 3, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "vocab_size": 320}
    target, draft = make_pair(directory / "checkpoints", **(sizes | options))
    engines = build_engines(
        BuildOptions(
            target,
            draft,
            directory / "engines",
            backend="cuda",
            dtype=dtype,
            exit_layers=exit_layers,
            max_seq_len=max_seq_len,
            tp_size=tp_size,
        )
    )
    assert engines is not None
    return engines


def build_moe_pair(
    directory: Path,
    family: str = "qwen3_moe",
    exit_layers: tuple[int, ...] = (),
    max_seq_len: int = 256,
    backend: str = "cuda",
    quantization: str = "none",
    **options,
) -> EngineDir:
    """Build a mixture of experts and a related dense draft as build_pair does; reuse checkpoints that exist."""
    sizes = {"num_layers": 3, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "vocab_size": 320}
    folder = directory / "checkpoints"
    if not folder.exists():
        make_moe_pair(folder, family, **(sizes | options))
    engines = build_engines(
        BuildOptions(
            folder / "target",
            folder / "draft" if (folder / "draft").exists() else None,
            directory / f"{backend}{'' if quantization == 'none' else quantization}",
            backend=backend,
            dtype="bfloat16",
            quantization=quantization,
            exit_layers=exit_layers,
            max_seq_len=max_seq_len,
        )
    )
    assert engines is not None
    return engines


def build_with_head(
    directory: Path,
    make: Callable[..., Path] | None,
    dtype: str = "bfloat16",
    exit_layers: tuple[int, ...] = (),
    tp_size: int = 1,
    mtp_reads_normed: bool = False,
    eagle3_norm_output: str = "",
    **head,
) -> EngineDir:
    """A random target of four layers (directory/t) and a head that `make` writes (directory/h); None: the target's own
    MTP layer."""
    sizes = {"vocab_size": 320, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    target = (make_mimo if make is None else make_checkpoint)(directory / "t", **sizes)
    limits = {"max_seq_len": 128, "max_batch_size": 4, "max_num_tokens": 128, "max_draft_len": 5}
    engines = build_engines(
        BuildOptions(
            target,
            None if make is None else make(directory / "h", target, **head),
            directory / "e",
            backend="cuda",
            dtype=dtype,
            exit_layers=exit_layers,
            tp_size=tp_size,
            mtp=make is None,
            mtp_reads_normed=mtp_reads_normed,
            eagle3_norm_output=eagle3_norm_output,
            **limits,
        )
    )
    assert engines is not None
    return engines


def open_engine(
    path: Path,
    ops=None,
    dtype=torch.float32,
    runtime=None,
    draft_probs=None,
    quantization=Quantization.NONE,
    kv_dtype=KvCacheDtype.AUTO,
    partition=WHOLE,
    **limits,
):
    """An engine on the host: exact in float32 unless told otherwise."""
    sizes = {
        "num_blocks": MAX_BATCH_SIZE * 8,
        "tokens_per_block": 32,
        "max_batch_size": MAX_BATCH_SIZE,
        "max_num_tokens": 96,
        "max_seq_len": 256,
        "max_logit_rows": 96,
        "keeps_runners_up": limits.get("max_draft_len", 0) > 0,
    }
    runtime = runtime or HostRuntime()
    with CudaFile.open(path) as file:
        weights, segments = DeviceWeights.load(file, runtime.device, dtype, quantization), file.segments
    return make_engine(
        weights,
        segments,
        Placement(ops or ExactOps(), runtime, partition),
        GpuLimits(**(sizes | limits)),
        draft_probs=draft_probs,
        kv_dtype=kv_dtype,
    )


def reference_logits(engines, role: str, tokens) -> np.ndarray:
    with ExitStack() as stack:
        checkpoint = open_checkpoint(engines.path.parent / "checkpoints" / role, stack)
        return ReferenceModel(checkpoint.config, checkpoint.weights).logits(list(map(int, tokens))).numpy()


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 320, count).astype(np.int32)
