"""copy_kv: copy tokens between blocks of a paged cache, in all layers at once."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.tensors import ALIGNMENT, pointer, pointer_to

if TYPE_CHECKING:
    from torch import Tensor

STEM = "copy_kv"
NUM_THREADS = 128


def copy_kv(launcher: Launcher, copies: Tensor, cache: Tensor) -> None:
    """Launch the kernel, asynchronously. lab/reference/cuda/copy_kv.py says what it computes.

    copies int32 [4, n]: source block, target block, first offset, end offset. cache [planes, blocks, heads,
    tokens_per_block, head_dim], with rows of a multiple of 16 bytes.
    """
    num_planes, num_blocks, num_heads, tokens_per_block, row_bytes = _shape_of(cache)
    if row_bytes % ALIGNMENT:
        raise InvalidArgumentError(f"the cache has rows of {row_bytes} bytes; it must be a multiple of {ALIGNMENT}")
    copies_at, num_copies = pointer("copies", copies, "int32", (4, None)), copies.shape[1]
    if not num_copies:
        return
    sizes = (num_copies, num_planes, num_blocks, num_heads, tokens_per_block, row_bytes)
    arguments = (copies_at, *map(ctypes.c_int32, sizes), pointer_to(cache))
    launcher.launch("copy_kv", (num_copies, num_planes * num_heads, 1), (NUM_THREADS, 1, 1), arguments)


def _shape_of(cache: Tensor) -> tuple[int, int, int, int, int]:
    """Return the sizes of a cache, the last in bytes."""
    if cache.dim() != 5 or not cache.is_contiguous():
        raise InvalidArgumentError(
            f"the cache has shape {list(cache.shape)} and strides {cache.stride()}; it must be contiguous and have 5 "
            "dimensions (planes, blocks, heads, tokens_per_block, head_dim)"
        )
    num_planes, num_blocks, num_heads, tokens_per_block, head_dim = cache.shape
    return num_planes, num_blocks, num_heads, tokens_per_block, head_dim * cache.element_size()
