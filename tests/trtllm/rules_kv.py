"""TensorRT-LLM 1.2's KV cache manager, written down plainly: blocks per sequence; rules.py says what is left out."""

from __future__ import annotations

from dataclasses import dataclass


def blocks_for(num_tokens, tokens_per_block):
    return -(-num_tokens // tokens_per_block)


class KvCacheStats:
    def __init__(self):
        self.max_num_blocks = self.free_num_blocks = self.used_num_blocks = self.tokens_per_block = 0


@dataclass
class _Sequence:
    num_tokens: int
    blocks: list[int]


class KVCacheManager:
    """Blocks per sequence, without reuse."""

    def __init__(self, num_kv_heads_per_layer, size_per_head, tokens_per_block, blocks_per_window, *rest):
        (_, _, windows, _, _, _, _, max_sequence_length, enable_block_reuse, *_) = rest
        assert not enable_block_reuse, "block reuse is not modeled"
        ((self._window, (primary, secondary)),) = blocks_per_window.items()
        assert windows == [self._window]
        assert self._window >= max_sequence_length
        assert secondary == 0
        self._size = tokens_per_block
        self._num_blocks = primary
        self._free = list(range(primary))
        self._sequences = {}
        self._scheduling_free = primary

    @property
    def tokens_per_block(self):
        return self._size

    @property
    def max_num_blocks(self):
        return self._num_blocks

    @property
    def enable_block_reuse(self):
        return False

    def allocate_pools(self, use_uvm):
        assert type(use_uvm) is bool

    def release_pools(self):
        pass

    def start_scheduling(self):
        self._scheduling_free = len(self._free)

    def get_kv_cache_stats(self):
        stats = KvCacheStats()
        stats.max_num_blocks, stats.free_num_blocks = self._num_blocks, len(self._free)
        stats.used_num_blocks, stats.tokens_per_block = self._num_blocks - len(self._free), self._size
        return stats

    def add_sequence(self, request_id, input_length, beam_width, llm_request):
        if request_id in self._sequences:
            raise RuntimeError("Assertion failed: emplaceDone")
        sequence = self._sequences[request_id] = _Sequence(input_length, [])
        for _ in range(blocks_for(input_length, self._size)):
            self._allocate_block(sequence)

    def add_token(self, request_id):
        sequence = self._sequences[request_id]
        if sequence.num_tokens % self._size == 0:
            self._allocate_block(sequence)
        sequence.num_tokens += 1

    def rewind_kv_cache(self, request_id, rewind_lengths):
        sequence = self._sequences[request_id]
        for _ in range(min(rewind_lengths, sequence.num_tokens)):
            sequence.num_tokens -= 1
            if sequence.num_tokens % self._size == 0:
                self._free.append(sequence.blocks.pop())

    def remove_sequence(self, request_id, llm_request, pin_on_release):
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._free += sequence.blocks

    def scheduling_remove_sequence(self, request_id):
        self._scheduling_free += len(self._sequences[request_id].blocks)

    def get_needed_blocks_one_step(self, request, two_steps_look_ahead, window_size):
        if request.is_context_init_state and request.is_first_context_chunk:
            return blocks_for(request.prompt_len + min(request.num_draft_tokens, request.max_new_tokens), self._size)
        if request.is_generation_in_progress_state:
            current = self._sequences[request.request_id].num_tokens
            most = request.max_new_tokens - (current - request.prompt_len)
            step = (2 if two_steps_look_ahead else 1) * (request.num_draft_tokens + 1)
            after = current + min(step, most)
            return 0 if after > window_size else blocks_for(after, self._size) - blocks_for(current, self._size)
        return 0

    def get_remaining_blocks_to_completion(self, request, window_size):
        total = blocks_for(min(request.prompt_len + request.max_new_tokens, window_size), self._size)
        sequence = self._sequences.get(request.request_id)
        return total - (len(sequence.blocks) if sequence else 0)

    def get_cache_block_ids(self, request_id, window_size):
        assert window_size == self._window
        return [list(self._sequences[request_id].blocks)]

    def _allocate_block(self, sequence):
        if not self._free:
            raise RuntimeError("Can't allocate new blocks. No free blocks left.")
        sequence.blocks.append(self._free.pop(0))
