"""Limits of a network and the resulting shapes of its inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from faser_trtllm.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class NetworkOptions:
    """Limits of a network; ConfigError for impossible ones. Rows: token positions of all requests of one pass.

    tokens_per_block: equal to max_seq_len for the linear cache that native attention needs (one block per request).
    max_query_rows: rows of one request in one pass. num_candidates: token ids that the early exit scores per row.
    num_blocks: KV blocks; 0: enough for max_batch_size requests of max_seq_len.
    profile_rows: row limits of further optimization profiles, ascending, all below max_num_tokens. Each profile has its
    own kernels (a small one serves verification, the full one prompts).
    read_layers: layers whose input rows a draft head reads (Source.read_layers).
    """

    dtype: str
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    tokens_per_block: int
    max_query_rows: int
    num_candidates: int = 8
    num_blocks: int = 0
    profile_rows: tuple[int, ...] = ()
    read_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "tokens_per_block", "max_query_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_candidates < 1:
            raise ConfigError(f"num_candidates is {self.num_candidates}; it must be at least 1")
        if self.max_query_rows > self.max_num_tokens:
            raise ConfigError(
                f"max_query_rows is {self.max_query_rows}; it must be at most max_num_tokens ({self.max_num_tokens})"
            )
        if self.num_blocks < 0:
            raise ConfigError(f"num_blocks is {self.num_blocks}; it must be at least 1, or 0 for the default")
        limits = (0, *self.profile_rows, self.max_num_tokens)
        if any(low >= high for low, high in pairwise(limits)):
            raise ConfigError(
                f"profile_rows is {list(self.profile_rows)}; it must ascend between 1 and max_num_tokens - 1 "
                f"({self.max_num_tokens - 1})"
            )

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_seq_len // self.tokens_per_block)

    def dimension_ranges(self, max_rows: int) -> dict[str, tuple[int, int, int]]:
        """Return {dimension name: (minimum, optimum, maximum)} of a profile of at most max_rows rows."""
        batch = self.max_batch_size
        rows = min(max_rows, max(16, 4 * batch))
        query_rows = min(self.max_query_rows, max_rows)
        blocks = self.num_blocks or batch * self.max_blocks_per_seq
        return {
            "rows": (1, rows, max_rows),
            "batch": (1, batch, batch),
            "batch_plus_one": (2, batch + 1, batch + 1),
            "query_rows": (1, min(query_rows, -(-rows // batch)), query_rows),
            "logit_rows": (1, rows, max_rows),
            "exit_rows": (1, rows, max_rows),
            "blocks": (1, blocks, blocks),
        }


def hidden_output(layer: int) -> str:
    """Return the name of the output with the hidden rows that enter a layer."""
    return f"hidden_{layer}"


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a network. shape: sizes, or names of dynamic dimensions (dimension_ranges)."""

    name: str
    dtype: str
    shape: Shape

    @property
    def is_dynamic(self) -> bool:
        return any(isinstance(size, str) for size in self.shape)

    @property
    def trt_shape(self) -> tuple[int, ...]:
        """The shape for TensorRT, with -1 for dynamic dimensions."""
        return tuple(-1 if isinstance(size, str) else size for size in self.shape)
