"""verify_attention: attention of ragged drafts and context chunks over a paged KV cache.

Row i of a request's n rows is at position kv_lens[b] - n + i and sees itself and everything before it, within the
window; without is_causal it also sees the request's rows after it, as in a block that a block drafter drafts. The
kernel is designed to read each request's K and V once per KV head while n * num_heads / num_kv_heads fits a tile of 16
or 64 packed rows: the bound is 2 * kv_len * head_dim * element size bytes over the memory's bandwidth.
plugins/cuda/README.md has times.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Argument, Dim3, Launcher
from faser_trtllm.ops.cuda.tensors import PagedKv, PagedShape, bits_of, check_kv, expect, pointer_to, type_name

if TYPE_CHECKING:
    from torch import Tensor

BUT_FIRST = -1
"""A value of `window`: rows see all positions except the first, which only its own row sees."""
HEAD_DIMS = (64, 80, 96, 128, 256)
SINKS_HEAD_DIM = 64  # kernels with sinks have this head size, and q in bf16
TILE_ROWS = (16, 64)
SPLIT_TOKENS = 512  # positions per chunk of a long context
SHORT_SPLITS = (128, 256)  # the same where so few requests run that most SMs would be idle
MIN_SPLIT_TOKENS = 64  # chunks of any launch are a power of two, at least this
MAX_WHOLE_TOKENS = SPLIT_TOKENS + SPLIT_TOKENS // 2 - 1  # a context of a single chunk
MAX_SPLIT_ROWS = 256  # limit on rows times group of a request that several blocks share (kMaxSplitRows)
MAX_WORKSPACE_BYTES = 64 << 20  # for the slots of further chunks; requests that find no room use one block per tile
MAX_ARRIVALS = 1 << 17  # limit on items times KV heads of a launch that merges in place (kMaxArrivals)
MAX_MERGED_ROWS = 512  # limit on chunks times rows that a tile's last block merges; more are merged by a second launch
BLOCKS_PER_SM = 3  # limited by registers
_COMBINE_WARPS = 4
COMBINE_THREADS = 32 * _COMBINE_WARPS


@dataclass(frozen=True, slots=True)
class AttentionShape(PagedShape):
    """The sizes of a launch."""

    window: int = 0  # number of positions that a row sees, up to its own; 0: all; or BUT_FIRST
    is_causal: bool = True  # rows see no position after their own
    has_sinks: bool = False  # the softmax has a further score per head, whose share is dropped

    @property
    def window_argument(self) -> int:
        """The kernels' argument for window and is_causal."""
        return self.window if self.is_causal else -2 - self.window

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


def choose_tile_rows(shape: AttentionShape, max_rows_per_request: int, deterministic: bool = False) -> int:
    """Return 16 if the rows of every request fit such a tile, else 64. max_rows_per_request: an upper bound.
    deterministic: always 64, since the two tiles' sums differ in the last bit."""
    return 16 if max_rows_per_request * shape.group <= 16 and not deterministic else 64


def choose_split_tokens(
    shape: AttentionShape, max_query_rows: int, max_kv_len: int, num_sms: int, deterministic: bool = False
) -> int:
    """Return the positions per chunk: few where few requests would leave SMs idle, since one block walks a chunk.

    An H100 took 26.1 us with chunks of 512 positions and 15.7 with chunks of 128 for one request at 512 positions with
    eight KV heads, but 37.6 and 58.4 for 32 requests. Short chunks are chosen while 512 positions of each request take
    at most a block per SM, and the shortest of those that a tile's last block can merge. max_query_rows, max_kv_len:
    upper bounds. deterministic: always SPLIT_TOKENS, since a row's last bits depend on its chunks.
    """
    tile_rows = choose_tile_rows(shape, max_query_rows, deterministic)
    tiles = min(shape.num_rows, shape.batch_size) * -(-max_query_rows * shape.group // tile_rows)
    blocks = tiles * shape.num_kv_heads

    def fits(split: int) -> bool:
        # Without a slot for each chunk, whole requests would be left to one block per tile.
        has_room = choose_max_slots(shape, max_kv_len, split) == _all_slots(shape, max_kv_len, split)
        return has_room and blocks * SPLIT_TOKENS <= num_sms * split

    is_split = max_query_rows * shape.group <= MAX_SPLIT_ROWS and not deterministic
    splits = [*filter(fits, SHORT_SPLITS if is_split else ()), SPLIT_TOKENS]
    for split in splits:
        slots = choose_max_slots(shape, max_kv_len, split)
        if merges_in_place(shape, tile_rows, max_query_rows, slots, max_kv_len, split):
            return split
    return splits[0]


def num_tiles(shape: AttentionShape, tile_rows: int) -> int:
    """Return the number of blocks for tiles along the grid's x: one more than any cu_q_lens can need."""
    requests = min(shape.num_rows, shape.batch_size)
    return (shape.num_rows * shape.group + requests * (tile_rows - 1)) // tile_rows + 1


def num_chunks(num_positions: int, split_tokens: int = SPLIT_TOKENS) -> int:
    """Return the chunks of a row that sees num_positions; a last one shorter than half belongs to the one before."""
    return max(1, (num_positions + split_tokens // 2) // split_tokens)


def max_chunks(shape: AttentionShape, max_kv_len: int, split_tokens: int = SPLIT_TOKENS) -> int:
    """Return the largest number of chunks that a request's rows can see. max_kv_len: an upper bound."""
    chunks = num_chunks(min(max_kv_len, shape.max_blocks_per_seq * shape.tokens_per_block), split_tokens)
    if shape.window > 0:
        chunks = min(chunks, (shape.window + MAX_SPLIT_ROWS // shape.group) // split_tokens + 2)
    return chunks


def choose_max_slots(shape: AttentionShape, max_kv_len: int, split_tokens: int = SPLIT_TOKENS) -> int:
    """Return the number of slots (partial results) for batches of this shape: one per row, and one per row and further
    chunk as far as memory allows.

    0: no context is longer than a chunk. max_kv_len: an upper bound.
    """
    most = shape.num_rows + MAX_WORKSPACE_BYTES // _slot_bytes(shape)
    return min(_all_slots(shape, max_kv_len, split_tokens), most)


def _all_slots(shape: AttentionShape, max_kv_len: int, split_tokens: int) -> int:
    chunks = max_chunks(shape, max_kv_len, split_tokens)
    return shape.num_rows * chunks if chunks > 1 else 0


def merges_in_place(
    shape: AttentionShape,
    tile_rows: int,
    max_query_rows: int,
    max_slots: int,
    max_kv_len: int,
    split_tokens: int = SPLIT_TOKENS,
) -> bool:
    """Return True if the last block of a tile merges its chunks, False if a second launch of more blocks does.

    max_query_rows, max_kv_len: upper bounds. Results are the same.
    """
    has_room = _max_arrivals(shape, tile_rows, max_slots) <= MAX_ARRIVALS
    num_merged = max_chunks(shape, max_kv_len, split_tokens) * min(tile_rows, max_query_rows * shape.group)
    return has_room and num_merged <= MAX_MERGED_ROWS


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Options of launch(), and the size of its workspace."""

    tile_rows: int
    split_tokens: int
    max_slots: int
    in_place: bool
    workspace_bytes: int

    @classmethod
    def choose(
        cls, shape: AttentionShape, max_query_rows: int, max_kv_len: int, num_sms: int, deterministic: bool = False
    ) -> AttentionLaunch:
        """Return the options for batches of this shape. max_query_rows, max_kv_len: upper bounds."""
        tile_rows = choose_tile_rows(shape, max_query_rows, deterministic)
        split = choose_split_tokens(shape, max_query_rows, max_kv_len, num_sms, deterministic)
        slots = choose_max_slots(shape, max_kv_len, split)
        in_place = merges_in_place(shape, tile_rows, max_query_rows, slots, max_kv_len, split)
        return cls(tile_rows, split, slots, in_place, workspace_bytes(shape, slots))


def _max_arrivals(shape: AttentionShape, tile_rows: int, max_slots: int) -> int:
    """Return an upper bound on a launch's items times KV heads; a tile's further chunk takes at least one slot."""
    more_items = max(0, max_slots - shape.num_rows) * -(-shape.group // tile_rows)
    return (num_tiles(shape, tile_rows) + more_items) * shape.num_kv_heads


def workspace_bytes(shape: AttentionShape, max_slots: int) -> int:
    """Return the bytes of a workspace of this many slots; per head, a slot has head_dim sums, a maximum and a total."""
    return max_slots * _slot_bytes(shape)


def _slot_bytes(shape: AttentionShape) -> int:
    return shape.num_heads * (shape.head_dim + 2) * 4


def kernel_name(shape: AttentionShape, tile_rows: int) -> str:
    """Return the entry point for a shape's types and head size."""
    return f"verify_attention_{_sinks(shape)}{shape.types}_h{shape.head_dim}_m{tile_rows}"


def combine_name(shape: AttentionShape) -> str:
    """Return the entry point that combines chunks."""
    return f"verify_attention_combine_{_sinks(shape)}{shape.dtype}"


def _sinks(shape: AttentionShape) -> str:
    return "sinks_" if shape.has_sinks else ""


def block_threads(shape: AttentionShape, tile_rows: int) -> int:
    """Return the threads per block of kernel_name()."""
    return 64 if tile_rows == 16 and shape.head_dim > 128 else 128


def grid(shape: AttentionShape, tile_rows: int, max_slots: int = 0, num_sms: int = 132) -> Dim3:
    """Return the grid of kernel_name(): tiles, and with slots more_blocks() more, x KV heads."""
    more = more_blocks(shape, num_sms) if max_slots else 0
    return (num_tiles(shape, tile_rows) + more, shape.num_kv_heads, 1)


def more_blocks(shape: AttentionShape, num_sms: int = 132) -> int:
    """Return the blocks along the grid's x for the chunks of long contexts: as many as run at a time."""
    return -(-BLOCKS_PER_SM * num_sms // shape.num_kv_heads)


def combine_grid(shape: AttentionShape) -> Dim3:
    """Return the grid of verify_attention_combine: rows x groups of four heads."""
    return (shape.num_rows, -(-shape.num_heads // _COMBINE_WARPS), 1)


def scalars(
    shape: AttentionShape,
    split_tokens: int,
    max_slots: int,
    in_place: bool,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> list[int]:
    """Return the int32 arguments between the inputs and the outputs, floats as their bits."""
    sizes = [shape.num_rows, shape.batch_size, shape.num_heads, shape.num_kv_heads, shape.num_blocks]
    sizes += [shape.tokens_per_block, shape.max_blocks_per_seq, shape.window_argument, split_tokens, max_slots]
    return [*sizes, int(in_place), bits_of(scale * k_scale), bits_of(v_scale)]


def combine_scalars(shape: AttentionShape, split_tokens: int, max_slots: int, v_scale: float) -> list[int]:
    """Return the int32 arguments of verify_attention_combine."""
    sizes = [shape.num_rows, shape.batch_size, shape.num_heads, shape.num_kv_heads, shape.tokens_per_block]
    return [
        *sizes,
        shape.max_blocks_per_seq,
        shape.window_argument,
        split_tokens,
        max_slots,
        bits_of(v_scale),
        shape.head_dim,
    ]


def launch(
    module: Launcher,
    q: Tensor,
    kv: PagedKv,
    out: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    is_causal: bool = True,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    tile_rows: int = 64,
    split_tokens: int = SPLIT_TOKENS,
    max_slots: int = 0,
    num_sms: int = 132,
    workspace: Tensor | None = None,
    in_place: bool = False,
    combine: bool = True,
    sinks: Tensor | None = None,
) -> None:
    """Write attention of every row over its request's positions to `out`, asynchronously; q and out are [num_rows,
    num_heads, head_dim] of one type.

    scale: of the scores; None: 1 / sqrt(head_dim). sinks: fp32 [num_heads], a further score of each head's softmax,
    whose share is dropped, as in gpt-oss. Positions in a block that does not exist are zeros; positions past the table
    are not seen; a row that sees nothing or is outside all requests gives zeros. K and V beyond a request's kv_len are
    never read; those before it must be finite, since kernels multiply masked positions by zero.

    tile_rows, split_tokens, max_slots, in_place: see AttentionLaunch.choose(). Slots need a `workspace` of
    workspace_bytes() and, unless in_place, a second launch; max_slots must be at least num_rows where a context has
    several chunks. combine: False leaves rows that several blocks share in the workspace, for launch_combine(). A row's
    bits depend on tile_rows and split_tokens, but not on max_slots, in_place or combine, nor on the other rows of its
    request or batch. Launches of a module with in_place must not overlap. The host reads only addresses, shapes and
    types of the tensors. Raises InvalidArgumentError if no kernel fits.
    """
    shape = shape_of(q, kv, window, is_causal, sinks)
    expect("out", out, shape.dtype, (shape.num_rows, shape.num_heads, shape.head_dim))
    scale = default_scale(shape.head_dim) if scale is None else scale
    for name, value in (("scale", scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if not (value > 0 and math.isfinite(value)):
            raise InvalidArgumentError(f"{name} is {value}; it must be finite and above 0")
    if tile_rows not in TILE_ROWS:
        raise InvalidArgumentError(f"tile_rows is {tile_rows}; it must be one of {TILE_ROWS}")
    check_split_tokens("split_tokens", split_tokens)
    needed = workspace_bytes(shape, max_slots)
    most = shape.num_rows + MAX_WORKSPACE_BYTES // _slot_bytes(shape)
    if max_slots != 0 and not shape.num_rows <= max_slots <= most:
        raise InvalidArgumentError(
            f"max_slots is {max_slots}; it must be 0 or {shape.num_rows} to {most} for this shape"
        )
    if needed and (workspace is None or workspace.numel() * workspace.element_size() < needed):
        held = 0 if workspace is None else workspace.numel() * workspace.element_size()
        raise InvalidArgumentError(f"workspace holds {held} bytes; {max_slots} slots need {needed}")
    if in_place and _max_arrivals(shape, tile_rows, max_slots) > MAX_ARRIVALS:
        raise InvalidArgumentError(f"in_place is set, but {max_slots} slots may need more than {MAX_ARRIVALS} counters")
    if shape.num_rows == 0:
        return
    pointers = [pointer_to(tensor) for tensor in (q, *kv)]
    sizes = scalars(shape, split_tokens, max_slots, in_place, scale, k_scale, v_scale)
    outputs = [pointer_to(out), pointer_to(workspace if needed else None)]
    if sinks is not None:
        outputs.append(pointer_to(sinks))
    arguments: list[Argument] = [*pointers, *map(ctypes.c_int32, sizes), *outputs]
    blocks = grid(shape, tile_rows, max_slots, num_sms)
    module.launch(kernel_name(shape, tile_rows), blocks, (block_threads(shape, tile_rows), 1, 1), arguments)
    if combine and workspace is not None and needed and not in_place:
        rows = (kv.cu_q_lens, kv.kv_lens, out)
        launch_combine(module, shape, out, workspace, *rows, split_tokens, max_slots, v_scale, sinks)


def check_split_tokens(name: str, split_tokens: int) -> None:
    if split_tokens < MIN_SPLIT_TOKENS or split_tokens & (split_tokens - 1):
        raise InvalidArgumentError(f"{name} is {split_tokens}; it must be a power of two, at least {MIN_SPLIT_TOKENS}")


def launch_combine(
    module: Launcher,
    shape: AttentionShape,
    whole: Tensor,
    workspace: Tensor,
    cu_q_lens: Tensor,
    kv_lens: Tensor,
    out: Tensor,
    split_tokens: int,
    max_slots: int,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
) -> None:
    """Launch the second kernel: combine the workspace's partial results into rows of `out`, and copy the other rows
    from `whole`, unless that is `out`."""
    pointers = [pointer_to(tensor) for tensor in (whole, workspace, cu_q_lens, kv_lens)]
    sizes = map(ctypes.c_int32, combine_scalars(shape, split_tokens, max_slots, v_scale))
    arguments: list[Argument] = [*pointers, *sizes, pointer_to(out)]
    if sinks is not None:
        arguments.append(pointer_to(sinks))
    module.launch(combine_name(shape), combine_grid(shape), (COMBINE_THREADS, 1, 1), arguments)


def default_scale(head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim)


def shape_of(
    q: Tensor,
    kv: PagedKv,
    window: int = 0,
    is_causal: bool = True,
    sinks: Tensor | None = None,
) -> AttentionShape:
    """Return the sizes of the tensors; raise InvalidArgumentError, naming the tensor, if one does not fit the rest."""
    if q.dim() != 3 or kv.k_cache.dim() != 4:
        raise InvalidArgumentError(
            f"q has {q.dim()} and k_cache {kv.k_cache.dim()} dimensions; they need 3 (rows, heads, head_dim) and 4 "
            "(blocks, KV heads, tokens_per_block, head_dim)"
        )
    num_rows, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, tokens_per_block, _ = kv.k_cache.shape
    if head_dim not in HEAD_DIMS:
        raise InvalidArgumentError(f"head_dim is {head_dim}; the kernels have {HEAD_DIMS}")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise InvalidArgumentError(f"num_heads is {num_heads}; it must be a multiple of num_kv_heads, {num_kv_heads}")
    if tokens_per_block == 0:
        raise InvalidArgumentError("tokens_per_block is 0; it must be at least 1")
    least = BUT_FIRST if is_causal else 0
    if window < least:
        or_first = f", or {BUT_FIRST}" if is_causal else " where rows see those after them"
        raise InvalidArgumentError(f"window is {window}; it must be at least 0 (0: none){or_first}")
    dtype = type_name("q", q, "bf16", "fp16")
    expect("q", q, dtype, (num_rows, num_heads, head_dim))
    kv_dtype = check_kv(kv, dtype, head_dim)
    if sinks is not None:
        expect("sinks", sinks, "fp32", (num_heads,))
        if (dtype, head_dim) != ("bf16", SINKS_HEAD_DIM):
            raise InvalidArgumentError(
                f"q is {dtype} with a head_dim of {head_dim}; the kernels with sinks need bf16 and {SINKS_HEAD_DIM}"
            )
    sizes = (num_heads, num_kv_heads, head_dim, num_blocks, tokens_per_block, kv.block_table.shape[-1])
    options = (window, is_causal, sinks is not None)
    return AttentionShape(num_rows, kv.kv_lens.shape[0], *sizes, dtype, kv_dtype, *options)
