"""grouped_matmul: products of rows sorted by group, each group's with a matrix of its own.

A row's bits depend neither on the other rows nor on their number. Torch's grouped products are faster where they run.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.products.matmul import TILES
from faser_trtllm.ops.cuda.tensors import expect, pointer_to

if TYPE_CHECKING:
    from torch import Tensor

STEM = "grouped_matmul"
_VECTOR = 8
_BLOCK_SIZE = 32  # values of MXFP4 with one scale


@dataclass(frozen=True, slots=True)
class Mxfp4Matrices:
    """Matrices [num_groups, num_outs, width] in MXFP4 (models/mxfp4.py)."""

    blocks: Tensor  # uint8 [num_groups, num_outs, width / 2]: two numbers per byte, the first in the low half
    scales: Tensor  # uint8 [num_groups, num_outs, width / 32]: 2^(byte - 127) of each 32 numbers

    @property
    def shape(self) -> tuple[int, int, int]:
        num_groups, num_outs, num_bytes = self.blocks.shape
        return num_groups, num_outs, 2 * num_bytes

    @property
    def num_bytes(self) -> int:
        return self.blocks.numel() + self.scales.numel()


def choose_tile_rows(num_rows: int, num_groups: int) -> int:
    """Return the tile whose rows hold an average group; all tiles give the same bits."""
    return next((rows for rows in sorted(TILES) if num_rows <= rows * num_groups), max(TILES))


def launch(
    launcher: Launcher,
    x: Tensor,
    weights: Tensor | Mxfp4Matrices,
    ends: Tensor,
    out: Tensor,
    tile_rows: int | None = None,
) -> None:
    """Launch the kernel, asynchronously. lab/reference/cuda/experts/grouped_matmul.py says what it writes to `out`.

    width must be a multiple of 8, in MXFP4 of 32. tile_rows: None: choose_tile_rows(). The host reads only
    addresses, shapes and types of the tensors. Raises InvalidArgumentError if no kernel fits.
    """
    (num_rows, width), (num_groups, num_outs) = x.shape, weights.shape[:2]
    is_mxfp4 = isinstance(weights, Mxfp4Matrices)
    unit = _BLOCK_SIZE if is_mxfp4 else _VECTOR
    if width % unit:
        raise InvalidArgumentError(f"x has rows of {width}; it must be a multiple of {unit}")
    expect("x", x, "bf16", (num_rows, width))
    if isinstance(weights, Mxfp4Matrices):
        expect("weights.blocks", weights.blocks, "uint8", (num_groups, num_outs, width // 2))
        expect("weights.scales", weights.scales, "uint8", (num_groups, num_outs, width // _BLOCK_SIZE))
        matrices = [weights.blocks, weights.scales]
    else:
        expect("weights", weights, "bf16", (num_groups, num_outs, width))
        matrices = [weights]
    expect("ends", ends, "int32", (num_groups,))
    expect("out", out, "bf16", (num_rows, num_outs))
    tile_rows = choose_tile_rows(num_rows, num_groups) if tile_rows is None else tile_rows
    if tile_rows not in TILES:
        raise InvalidArgumentError(f"tile_rows is {tile_rows}; it must be one of {tuple(TILES)}")
    if not num_rows:
        return
    tile_outs, num_threads = TILES[tile_rows]
    numbers = map(ctypes.c_int32, (num_rows, num_groups, num_outs, width))
    arguments = (*map(pointer_to, (x, *matrices, ends)), *numbers, pointer_to(out))
    blocks = (num_rows // tile_rows + min(num_groups, num_rows), -(-num_outs // tile_outs), 1)
    launcher.launch(
        f"grouped_matmul_{'mxfp4_' if is_mxfp4 else ''}m{tile_rows}", blocks, (num_threads, 1, 1), arguments
    )
