"""Model the time of the kernels other than attention, acceptance and draws by arithmetic.

MODELLED, nothing runs. Bytes and blocks are those of the kernels' sources. Each SM has the cost model's bandwidth from
memory and more from the L2 cache, and all together that of the memory; blocks go to the first free SM. Kernels with one
block for all requests are left out, since their time is that of a launch.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.gpu.modelled_attention import FIXED_US, LAUNCH_US
from faser_trtllm.ops.cuda import gated_silu
from faser_trtllm.ops.cuda.append_kv import NUM_THREADS as APPEND_THREADS
from lab.costmodel.gpu import Gpu, find_gpu

L2_GB_PER_MS = 0.1  # per SM, assumed: 64 bytes per clock at 1.6 GHz
HIDDEN, INNER, NUM_LAYERS = 4096, 14336, 32  # Llama-3.1-8B, bf16
HEADS, HEAD_DIM = 32 + 2 * 8, 128  # q, k and v
NUM_CANDIDATES = 8
NUM_DRAFTS = 4  # five rows per request
BATCHES = (1, 32, 256)


@dataclass(frozen=True)
class Block:
    """Bytes of a kernel's block: read first, read again (from the L2 cache), and written."""

    first: float
    again: float
    written: float


@dataclass(frozen=True)
class Kernel:
    """A kernel with equal blocks. once_bytes: a row's numbers, each once. per_step: launches in a decoding step."""

    block: Block
    blocks_per_row: int
    once_bytes: float
    per_step: int


def append_kv() -> Kernel:
    blocks = -(-HEADS * (HEAD_DIM // 16) // APPEND_THREADS)
    qkv, hidden = 2.0 * HEADS * HEAD_DIM, 2.0 * HIDDEN
    block = Block((qkv + hidden) / blocks, hidden * (blocks - 1) / blocks, qkv / blocks)
    return Kernel(block, blocks, 2 * qkv + hidden, NUM_LAYERS)


def silu() -> Kernel:
    blocks = -(-INNER // (8 * gated_silu.NUM_THREADS))
    hidden = 2.0 * HIDDEN
    block = Block((4.0 * INNER + hidden) / blocks, hidden * (blocks - 1) / blocks, 2.0 * INNER / blocks)
    return Kernel(block, blocks, 6.0 * INNER + hidden, NUM_LAYERS)


def silu_e4m3() -> Kernel:
    hidden = 2.0 * HIDDEN
    return Kernel(Block(4.0 * INNER + hidden, 0.0, INNER), 1, 5.0 * INNER + hidden, NUM_LAYERS)


def quantize_rows() -> Kernel:
    return Kernel(Block(2.0 * HIDDEN, 2.0 * HIDDEN, HIDDEN), 1, 3.0 * HIDDEN, NUM_LAYERS)


def add_quantize_rows() -> Kernel:
    return Kernel(Block(4.0 * HIDDEN, 2.0 * HIDDEN, 3.0 * HIDDEN), 1, 7.0 * HIDDEN, 2 * NUM_LAYERS)


def early_exit() -> Kernel:
    """Return early_exit, where every candidate's warp reads the hidden row and the norm from a cache."""
    row = 2.0 * HIDDEN
    return Kernel(Block(row * (1 + NUM_CANDIDATES), row * NUM_CANDIDATES, 0.0), 1, row * (1 + NUM_CANDIDATES), 1)


def compact_rows() -> Kernel:
    return Kernel(Block(2.0 * HIDDEN, 0.0, 2.0 * HIDDEN), 1, 4.0 * HIDDEN, 1)


KERNELS: Mapping[str, Callable[[], Kernel]] = {
    "append_kv": append_kv,
    "gated_silu": silu,
    "gated_silu, fp8": silu_e4m3,
    "quantize_rows, fp8": quantize_rows,
    "add_quantize_rows, fp8": add_quantize_rows,
    "early_exit": early_exit,
    "compact_rows": compact_rows,
}


def modelled_us(kernel: Kernel, num_rows: int, gpu: Gpu) -> float:
    block = kernel.block
    busy_us = (block.first + block.written) / (1e6 * gpu.sm_gb_per_ms) + block.again / (1e6 * L2_GB_PER_MS)
    num_blocks = num_rows * kernel.blocks_per_row
    free = [0.0] * gpu.num_sms
    for _ in range(num_blocks):
        heapq.heappush(free, heapq.heappop(free) + busy_us)
    moved_us = num_blocks * (block.first + block.written) / (1e6 * gpu.gb_per_ms)
    return FIXED_US + LAUNCH_US + max(max(free), moved_us)


def once_us(kernel: Kernel, num_rows: int, gpu: Gpu) -> float:
    return kernel.once_bytes * num_rows / (1e6 * gpu.gb_per_ms)


def main(argv: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="faser bench gpu.modelled_rows", description=__doc__).parse_args(argv)
    gpu = find_gpu("h100")
    print(
        f"MODELLED: microseconds of a launch, and of a step's launches, for an 8B on {gpu.name} ({gpu.num_sms} SMs), "
        f"{NUM_DRAFTS} drafts per request\n"
    )
    heads = " | ".join(f"{n} requests: us, of the roofline" for n in BATCHES)
    print(f"| kernel | {heads} | of a step at {BATCHES[1]} |\n|---|{'---|' * len(BATCHES)}---|")
    for name, make in KERNELS.items():
        kernel, cells = make(), []
        for num_requests in BATCHES:
            num_rows = num_requests * (NUM_DRAFTS + 1)
            found = modelled_us(kernel, num_rows, gpu)
            cells.append(f"{found:.1f}, {once_us(kernel, num_rows, gpu) / found:.2f}")
            if num_requests == BATCHES[1]:
                of_step = f"{kernel.per_step} x {found:.1f} = {kernel.per_step * found:.0f}"
        print(f"| {name} | {' | '.join(cells)} | {of_step} |")


if __name__ == "__main__":
    main()
