"""Adapt TensorRT-LLM's KVCacheManager, which assigns block ids, to our KV cache protocol (kvcache/base.py).

The KV memory belongs to our engines; the pools that TensorRT-LLM allocates have one layer, one head and the smallest
head size. Block reuse is off, because TensorRT-LLM does not know which blocks the draft model has filled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.kvcache.base import BlockListener, CachedPrefix, Int32Array

_HEAD_SIZE = 8  # the smallest size with aligned pools
_BEAM_WIDTH = 1


class TrtllmKVCacheManager:
    """A KVCache (kvcache/base.py) over TensorRT-LLM's manager. bindings: see trtllm/gate.py.

    As in TensorRT-LLM's executor, a sequence's tokens are those that it holds or needs KV for: at first the prompt,
    before a pass one more and its drafts, and after the pass the computed ones.
    """

    def __init__(
        self,
        bindings: Any,
        num_blocks: int,
        tokens_per_block: int,
        max_batch_size: int,
        max_seq_len: int,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.num_blocks = num_blocks
        self.num_cached_blocks = self.num_reused_blocks = 0
        self.num_allocated_blocks = 0
        max_blocks_per_seq = -(-max_seq_len // tokens_per_block)
        self.block_table: npt.NDArray[np.int32] = np.zeros((max_batch_size, max_blocks_per_seq), np.int32)
        self.bounds = np.tile(
            np.array([np.iinfo(np.int32).max] * 2 + [-1], np.int32), (max_batch_size, 1)
        )  # never reached
        self._window = max_seq_len
        self._requests: list[Any | None] = [None] * max_batch_size  # LlmRequest per slot
        self._num_tokens = [0] * max_batch_size
        self.impl = bindings.KVCacheManager(
            num_kv_heads_per_layer=[1],
            size_per_head=_HEAD_SIZE,
            tokens_per_block=tokens_per_block,
            blocks_per_window={self._window: (num_blocks, 0)},  # primary and secondary blocks
            max_num_sequences=max_batch_size,
            max_beam_width=_BEAM_WIDTH,
            max_attention_window_vec=[self._window],
            temp_attention_window_inputs=None,
            dtype=bindings.DataType.HALF,
            sink_token_length=0,
            stream=0,  # CUDA's default stream; nothing is copied
            max_sequence_length=max_seq_len,
            enable_block_reuse=False,
        )
        self.impl.allocate_pools(False)

    @property
    def num_free_blocks(self) -> int:
        return int(self.impl.get_kv_cache_stats().free_num_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def num_held_blocks(self, slot: int) -> int:
        return len(self._block_ids(slot))

    def hold(self, slot: int, llm_request: Any) -> None:
        """Set the LlmRequest of the slot's next sequence."""
        assert self._requests[slot] is None, f"slot {slot} is taken"
        self._requests[slot] = llm_request

    def add_sequence(self, slot: int, tokens: npt.NDArray[np.int32], num_tokens: int, salt: str = "") -> CachedPrefix:
        """Allocate blocks for the whole context at once, as TensorRT-LLM does; call hold() first."""
        request = self._request(slot)
        self.impl.add_sequence(request.request_id, num_tokens, _BEAM_WIDTH, request)
        self._num_tokens[slot] = num_tokens
        self.num_allocated_blocks += len(self._write_blocks(slot))
        return CachedPrefix(0, 0)

    def allocate(self, slot: int, num_tokens: int) -> bool:
        missing = self.num_blocks_for(num_tokens) - self.num_blocks_for(self._num_tokens[slot])
        if missing > 0 and missing > self.num_free_blocks:
            return False
        request_id = self._request(slot).request_id
        for _ in range(num_tokens - self._num_tokens[slot]):
            self.impl.add_token(request_id)
        self._num_tokens[slot] = max(num_tokens, self._num_tokens[slot])
        if missing > 0:
            self._write_blocks(slot)
            self.num_allocated_blocks += missing
        return True

    def rewind(self, slot: int, num_tokens: int) -> None:
        surplus = self._num_tokens[slot] - num_tokens
        if surplus > 0:
            self.impl.rewind_kv_cache(self._request(slot).request_id, surplus)
            self._num_tokens[slot] = num_tokens

    def commit(
        self, slot: int, tokens: npt.NDArray[np.int32], num_computed_tokens: int, num_draft_computed_tokens: int
    ) -> None:
        """Do nothing, since no block is reused."""

    def forget_draft(self) -> None:
        """Do nothing, since no block is reused."""

    def discard(self, slot: int) -> None:
        """Do nothing, since no block is reused."""

    def allocate_many(self, slots: Int32Array, num_tokens: Int32Array) -> bool:
        return all(map(self.allocate, slots.tolist(), num_tokens.tolist()))

    def free(self, slot: int) -> None:
        request = self._request(slot)
        self.impl.remove_sequence(request.request_id, request, False)
        self._requests[slot] = None
        self._num_tokens[slot] = 0

    def watch(self, listener: BlockListener) -> bool:
        """Return False, since no block is reused."""
        return False

    def check_integrity(self) -> None:
        held: list[int] = []
        for slot, request in enumerate(self._requests):
            if request is None:
                continue
            blocks = self._block_ids(slot)
            assert len(blocks) == self.num_blocks_for(self._num_tokens[slot]), f"slot {slot} holds other blocks"
            assert self.block_table[slot, : len(blocks)].tolist() == blocks
            held += blocks
        assert len(held) == len(set(held)), "a block is held twice"
        assert all(0 <= block < self.num_blocks for block in held), "a block id is not one of the engines' blocks"
        assert len(held) + self.num_free_blocks == self.num_blocks, "a block leaked"

    def _request(self, slot: int) -> Any:
        request = self._requests[slot]
        assert request is not None, f"slot {slot} holds no sequence"
        return request

    def _block_ids(self, slot: int) -> list[int]:
        return list(self.impl.get_cache_block_ids(self._request(slot).request_id, self._window)[0])

    def _write_blocks(self, slot: int) -> list[int]:
        blocks = self._block_ids(slot)
        self.block_table[slot, : len(blocks)] = blocks
        return blocks
