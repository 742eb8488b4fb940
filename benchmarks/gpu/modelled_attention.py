"""Model the time of attention's kernel by arithmetic, whole and in chunks.

MODELLED, nothing runs. Each SM has the cost model's bandwidth, however many blocks it runs, and all together that of
the memory. Items go to the first free SM in order; a block's start is hidden by the other blocks of its SM. The cost of
a second launch and of partial results is added.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from faser_trtllm.ops.cuda.verify_attention import BLOCKS_PER_SM, MAX_SPLIT_ROWS, SPLIT_TOKENS
from lab.costmodel.gpu import Gpu, find_gpu

FIXED_US = 2.0  # of a block before its first and after its last bytes, assumed
LAUNCH_US = 1.5  # of a further kernel in a graph, assumed
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3.1-8B, bf16
CASES: dict[str, tuple[tuple[int, int, int], ...]] = {  # (requests, rows of each, context)
    "1 request, 1 row, 8192": ((1, 1, 8192),),
    "1 request, 6 rows, 32768": ((1, 6, 32768),),
    "8 requests, 6 rows, 4096": ((8, 6, 4096),),
    "64 requests, 1 row, 1024": ((64, 1, 1024),),
    "63 requests of 512 and one of 100000, 1 row": ((63, 1, 512), (1, 1, 100_000)),
    "63 requests of 512 and one of 100000, 6 rows": ((63, 6, 512), (1, 6, 100_000)),
    "256 requests, 1 row, 2048": ((256, 1, 2048),),
    "256 requests, 4 rows, 2048": ((256, 4, 2048),),
}


@dataclass(frozen=True)
class Item:
    """Work for one KV head. kv_bytes: read; partial_bytes: written and read again."""

    kv_bytes: float
    partial_bytes: float


def items_of(case: tuple[tuple[int, int, int], ...], is_split: bool) -> list[Item]:
    found = []
    group = NUM_HEADS // NUM_KV_HEADS
    for num_requests, num_rows, context_len in case:
        packed = num_rows * group
        chunks = -(-context_len // SPLIT_TOKENS) if is_split and packed <= MAX_SPLIT_ROWS else 1
        tiles = -(-packed // (16 if packed <= 16 else 64))
        part = min(context_len, SPLIT_TOKENS) if chunks > 1 else context_len
        written = 8.0 * packed * (HEAD_DIM + 1) if chunks > 1 else 0.0
        found += [Item(4.0 * part * HEAD_DIM, written)] * (num_requests * chunks * tiles * NUM_KV_HEADS)
    return found


def modelled_us(items: list[Item], gpu: Gpu) -> float:
    bytes_per_us, of_sm = 1e6 * gpu.gb_per_ms, 1e6 * gpu.sm_gb_per_ms
    free = [0.0] * gpu.num_sms
    for item in items:
        at = heapq.heappop(free)
        heapq.heappush(free, at + FIXED_US / BLOCKS_PER_SM + (item.kv_bytes + item.partial_bytes / 2) / of_sm)
    partial = sum(item.partial_bytes for item in items)
    combine_us = LAUNCH_US + partial / 2 / bytes_per_us if partial else 0.0
    moved = sum(item.kv_bytes + item.partial_bytes / 2 for item in items)
    return FIXED_US + max(max(free), moved / bytes_per_us) + combine_us


def main(argv: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="faser bench gpu.modelled_attention", description=__doc__).parse_args(argv)
    gpu = find_gpu("h100")
    print(f"MODELLED: microseconds of one layer's attention of an 8B on {gpu.name}, {gpu.num_sms} SMs\n")
    print("| batch | every byte once | whole contexts | chunks of 512 | of the roofline |\n|---|---|---|---|---|")
    for name, case in CASES.items():
        whole, split = (modelled_us(items_of(case, is_split), gpu) for is_split in (False, True))
        once = sum(4.0 * n * c * HEAD_DIM * NUM_KV_HEADS for n, _, c in case) / (1e6 * gpu.gb_per_ms)
        print(f"| {name} | {once:.1f} | {whole:.1f} | {split:.1f} | {once / split:.2f} |")


if __name__ == "__main__":
    main()
