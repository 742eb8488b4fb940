"""matmul: products of rows with a matrix. A row's bits depend neither on the other rows nor on their number.

Torch's products are faster, but their library chooses a kernel, and with it the order of each sum, by the number of
rows. plugins/cuda/README.md counts what the difference costs.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Argument, Launcher
from faser_trtllm.ops.cuda.tensors import expect, pointer_to, type_name

if TYPE_CHECKING:
    from torch import Tensor

TILES = {16: (16, 128), 64: (32, 128), 128: (128, 256)}
"""The outputs and threads of a block, by the rows of its tile."""
_FULL_BLOCKS = 64  # the largest tile is used from this many blocks on
_VECTOR = 8


def choose_tile_rows(num_rows: int, num_outs: int) -> int:
    """Return the fastest tile for a product; all tiles give the same bits."""
    if num_rows <= 16:
        return 16
    blocks = -(-num_rows // 128) * -(-num_outs // TILES[128][0])
    return 128 if num_rows > 64 and blocks >= _FULL_BLOCKS else 64


def launch(
    launcher: Launcher,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    addend: Tensor | None = None,
    bias: Tensor | None = None,
    tile_rows: int | None = None,
) -> None:
    """Launch the kernel, asynchronously. lab/reference/cuda/products/matmul.py says what it writes to `out`.

    width must be a multiple of 8. tile_rows: None: choose_tile_rows(). The host reads only addresses, shapes and types
    of the tensors. Raises InvalidArgumentError if no kernel fits.
    """
    dtype, to = type_name("x", x, "bf16", "fp16"), _result_type(x, out)
    (num_rows, width), num_outs = x.shape, weight.shape[0]
    if width % _VECTOR:
        raise InvalidArgumentError(f"x has rows of {width}; it must be a multiple of {_VECTOR}")
    expect("x", x, dtype, (num_rows, width))
    expect("weight", weight, dtype, (num_outs, width))
    expect("out", out, to, (num_rows, num_outs))
    if addend is not None:
        expect("addend", addend, to, (num_rows, num_outs))
    if bias is not None:
        expect("bias", bias, dtype, (num_outs,))
    tile_rows = choose_tile_rows(num_rows, num_outs) if tile_rows is None else tile_rows
    if tile_rows not in TILES:
        raise InvalidArgumentError(f"tile_rows is {tile_rows}; it must be one of {tuple(TILES)}")
    if not num_rows:
        return
    tile_outs, num_threads = TILES[tile_rows]
    arguments: list[Argument] = [pointer_to(each) for each in (x, weight, addend, bias)]
    arguments += map(ctypes.c_int32, (num_rows, num_outs, width))
    arguments.append(pointer_to(out))
    blocks = (-(-num_rows // tile_rows), -(-num_outs // tile_outs), 1)
    kernel = f"matmul_{dtype}{'' if to == dtype else '_' + to}_m{tile_rows}"
    launcher.launch(kernel, blocks, (num_threads, 1, 1), arguments)


def _result_type(x: Tensor, out: Tensor) -> str:
    return type_name("out", out, type_name("x", x), "fp32")
