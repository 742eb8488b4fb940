"""grouped_matmul: products of rows sorted by group, each group's with a matrix of its own.

A row's bits depend neither on the other rows nor on their number. Torch's grouped products are faster where they run.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.products.matmul import TILES
from faser_trtllm.ops.cuda.tensors import expect, pointer_to

if TYPE_CHECKING:
    from torch import Tensor

STEM = "grouped_matmul"
_VECTOR = 8


def choose_tile_rows(num_rows: int, num_groups: int) -> int:
    """Return the tile whose rows hold an average group; all tiles give the same bits."""
    return next((rows for rows in sorted(TILES) if num_rows <= rows * num_groups), max(TILES))


def launch(
    launcher: Launcher, x: Tensor, weights: Tensor, ends: Tensor, out: Tensor, tile_rows: int | None = None
) -> None:
    """Launch the kernel, asynchronously. lab/reference/cuda/experts/grouped_matmul.py says what it writes to `out`.

    Matrices are bf16; width must be a multiple of 8. tile_rows: None: choose_tile_rows(). The host reads only
    addresses, shapes and types of the tensors. Raises InvalidArgumentError if no kernel fits.
    """
    (num_rows, width), (num_groups, num_outs) = x.shape, weights.shape[:2]
    if width % _VECTOR:
        raise InvalidArgumentError(f"x has rows of {width}; it must be a multiple of {_VECTOR}")
    expect("x", x, "bf16", (num_rows, width))
    expect("weights", weights, "bf16", (num_groups, num_outs, width))
    expect("ends", ends, "int32", (num_groups,))
    expect("out", out, "bf16", (num_rows, num_outs))
    tile_rows = choose_tile_rows(num_rows, num_groups) if tile_rows is None else tile_rows
    if tile_rows not in TILES:
        raise InvalidArgumentError(f"tile_rows is {tile_rows}; it must be one of {tuple(TILES)}")
    if not num_rows:
        return
    tile_outs, num_threads = TILES[tile_rows]
    numbers = map(ctypes.c_int32, (num_rows, num_groups, num_outs, width))
    arguments = (*map(pointer_to, (x, weights, ends)), *numbers, pointer_to(out))
    blocks = (num_rows // tile_rows + min(num_groups, num_rows), -(-num_outs // tile_outs), 1)
    launcher.launch(f"grouped_matmul_m{tile_rows}", blocks, (num_threads, 1, 1), arguments)
