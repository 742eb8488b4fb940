"""TensorRT-LLM 1.2's scheduling rules, written down plainly for the generated stand-ins.

From the sources that scheduler-1.2.json names under *_rules. Left out: block reuse, encoders, LoRA, beams,
disaggregated serving. States are compared by their order, as there. self._package: what is generated, by the recorded
names.
"""

from __future__ import annotations

from tests.trtllm.rules_kv import KVCacheManager, KvCacheStats

CONTEXT_INIT, GENERATION_IN_PROGRESS, GENERATION_TO_COMPLETE, GENERATION_COMPLETE = 2, 3, 4, 5
_PREFIX = "tensorrt_llm.bindings.internal"


class LlmRequest:
    """A request of the batch manager: tokens, state, and how far its context is."""

    def __init__(self, request_id, max_new_tokens, input_tokens, sampling_config, is_streaming, *rest):
        self.request_id = request_id
        self.prompt_len = len(input_tokens)
        self.max_new_tokens = max_new_tokens
        self.sampling_config = sampling_config
        self._tokens = list(input_tokens)
        self._draft_tokens = []
        self._orig_prompt_len = len(input_tokens)
        self._start_context()

    @property
    def state(self):
        return self._state

    @state.setter
    def state(self, value):
        self._state = value

    @property
    def draft_tokens(self):
        return list(self._draft_tokens) or None

    @draft_tokens.setter
    def draft_tokens(self, tokens):
        if tokens is not None:
            self._draft_tokens = list(tokens)

    @property
    def num_draft_tokens(self):
        return len(self._draft_tokens)

    @property
    def orig_prompt_len(self):
        return self._orig_prompt_len

    @property
    def max_beam_num_tokens(self):
        return len(self._tokens)

    @property
    def is_context_init_state(self):
        return self._state.value == CONTEXT_INIT

    @property
    def is_generation_in_progress_state(self):
        return self._state.value in (GENERATION_IN_PROGRESS, GENERATION_TO_COMPLETE)

    @property
    def is_generation_complete_state(self):
        return self._state.value == GENERATION_COMPLETE

    @property
    def context_remaining_length(self):
        return self.prompt_len - self.context_current_position

    @property
    def context_chunk_size(self):
        self._need_context("getContextChunkSize")
        return self._chunk_size

    @context_chunk_size.setter
    def context_chunk_size(self, size):
        self._need_context("setContextChunkSize")
        if size < 0:
            raise RuntimeError(f"The chunk size of context ({size}) can't be negative.")
        self._chunk_size = min(size, self.context_remaining_length)

    @property
    def is_first_context_chunk(self):
        return self.context_current_position == 0

    @property
    def is_last_context_chunk(self):
        return self.context_current_position + self.context_chunk_size == self.prompt_len

    def move_to_next_context_chunk(self):
        self.context_current_position += self.context_chunk_size
        self.context_chunk_size = 0

    def has_draft_tokens(self):
        return bool(self._draft_tokens)

    def get_tokens(self, beam):
        return list(self._tokens)

    def get_num_tokens(self, beam):
        return len(self._tokens)

    def add_new_token(self, token, beam):
        if type(token) is not int:
            raise TypeError("add_new_token(): incompatible function arguments")
        self._tokens.append(token)
        return len(self._tokens)

    def pause(self, max_input_len):
        new_prompt_len = min(max_input_len, len(self._tokens))
        del self._tokens[new_prompt_len:]
        self.max_new_tokens -= new_prompt_len - self.prompt_len
        self.prompt_len = new_prompt_len
        self._start_context()

    def _start_context(self):
        self._state = self._package["tensorrt_llm.bindings.LlmRequestState"].CONTEXT_INIT
        self.context_current_position = 0
        self._chunk_size = self.prompt_len

    def _need_context(self, what):
        if not self.is_context_init_state:
            raise RuntimeError(f"{what} is only possible during the context phase.")

    def _discard_draft_tokens(self, count):
        del self._draft_tokens[len(self._draft_tokens) - count :]


class CapacityScheduler:
    """Who may run: by the blocks that are free."""

    def __init__(self, max_num_requests, capacity_scheduler_policy, has_kv_cache_manager, two_steps, until, after):
        assert has_kv_cache_manager
        self._max_num_requests = max_num_requests
        self._policy = capacity_scheduler_policy.name
        self._two_steps = two_steps
        self._until, self._after = until.value, after.value

    def __call__(self, active_requests, kv_cache_manager, peft_cache_manager, cross_kv_cache_manager):
        ready = [r for r in active_requests if self._until <= r.state.value < self._after]
        if self._policy == "MAX_UTILIZATION":
            fitting, paused = self._max_utilization(ready, kv_cache_manager)
        else:
            fitting, paused = self._no_evict(ready, kv_cache_manager), []
        return fitting, [], paused

    def _no_evict(self, ready, kv):
        """Keep the blocks of running requests to the end; add newcomers in order, up to the first that does not fit."""
        available = kv.get_kv_cache_stats().free_num_blocks
        scheduled, pending = [], []
        for request in ready:
            if len(scheduled) >= self._max_num_requests:
                break
            if request.is_generation_in_progress_state:
                scheduled.append(request)
                available -= kv.get_remaining_blocks_to_completion(request, kv._window)
            else:
                pending.append(request)
        if self._policy == "STATIC_BATCH" and scheduled:
            return scheduled
        for request in pending:
            if len(scheduled) >= self._max_num_requests:
                break
            needed = kv.get_remaining_blocks_to_completion(request, kv._window)
            if needed > available:
                break
            scheduled.append(request)
            available -= needed
        return scheduled

    def _max_utilization(self, ready, kv):
        """Schedule as many as fit this step; where one does not, the last that has started gives its blocks back."""
        kv.start_scheduling()
        scheduled, paused, num_blocks = [], [], 0
        place, end = 0, len(ready)
        while place < end:
            request = ready[place]
            needed = num_blocks + kv.get_needed_blocks_one_step(request, self._two_steps, kv._window)
            if len(scheduled) < self._max_num_requests and needed <= kv._scheduling_free:
                num_blocks = needed
                scheduled.append(request)
                place += 1
                continue
            started = [
                i
                for i in range(place, end)
                if ready[i].is_generation_in_progress_state
                or (ready[i].is_context_init_state and not ready[i].is_first_context_chunk)
            ]
            if not started:
                break
            kv.scheduling_remove_sequence(ready[started[-1]].request_id)
            paused.append(ready[started[-1]])
            end = started[-1]
        return scheduled, paused


class MicroBatchScheduler:
    """Who runs in this pass: by the tokens of the pass."""

    def __init__(self, ctx_chunk_config, max_context_length, until, after):
        self._chunking = ctx_chunk_config
        self._max_context_length = max_context_length
        self._until, self._after = until.value, after.value

    def __call__(self, active_requests, inflight_req_ids, max_batch_size_runtime, max_num_tokens_runtime):
        contexts, generations, chunked = [], [], []
        num_tokens, num_chunked_tokens, all_fit = 0, 0, True
        for request in active_requests:
            if not self._until <= request.state.value < self._after or request.request_id in inflight_req_ids:
                continue
            if request.is_generation_in_progress_state:
                cost = request.sampling_config.beam_width + request.num_draft_tokens
                if num_tokens + cost > max_num_tokens_runtime:
                    break
                generations.append(request)
                num_tokens += cost
            elif self._chunking is None:
                cost = request.get_num_tokens(0) + request.num_draft_tokens
                if cost > self._max_context_length:
                    raise RuntimeError(f"The number of context tokens ({cost}) exceeds the limit value")
                if num_tokens + cost > max_num_tokens_runtime:
                    break
                contexts.append(request)
                num_tokens += cost
            else:
                request.context_chunk_size = request.context_remaining_length
                cost = request.context_chunk_size + request.num_draft_tokens
                if cost > self._max_context_length:
                    cost, all_fit = self._max_context_length, False
                chunked.append(request)
                num_chunked_tokens += cost
            if len(contexts) + len(generations) + len(chunked) >= max_batch_size_runtime:
                break
        if num_chunked_tokens > max_num_tokens_runtime - num_tokens:
            all_fit = False
        if not all_fit:
            self._set_chunk_sizes(chunked, max_num_tokens_runtime - num_tokens)
        contexts += [request for request in chunked if request.context_chunk_size > 0]
        if not all_fit:  # the last chunks go to the end
            contexts.sort(key=lambda request: request.is_last_context_chunk)
        return contexts, generations

    def _set_chunk_sizes(self, requests, capacity):
        unit = self._chunking.chunk_unit_size
        for request in requests:
            request.context_chunk_size = 0
        if self._chunking.chunking_policy.name == "EQUAL_PROGRESS":
            self._equal_progress(requests, capacity, unit)
        else:
            self._first_come_first_served(requests, capacity, unit)
        self._fit_draft_tokens(requests, capacity, unit)

    def _equal_progress(self, requests, capacity, unit):
        num_tokens, progress = 0, 1
        while num_tokens < capacity and progress:
            progress = 0
            for request in requests:
                before = request.context_chunk_size
                request.context_chunk_size = before + unit
                gain = request.context_chunk_size - before
                if num_tokens + gain > capacity or request.context_chunk_size > self._max_context_length:
                    request.context_chunk_size = before
                    continue
                num_tokens += gain
                progress += gain

    def _first_come_first_served(self, requests, capacity, unit):
        for request in requests:
            wanted = request.context_remaining_length
            size = min(wanted, capacity, self._max_context_length)
            if size != wanted:
                size = size // unit * unit
            request.context_chunk_size = size
            capacity -= size

    def _fit_draft_tokens(self, requests, capacity, unit):
        num_tokens = sum(request.context_chunk_size for request in requests)
        for request in requests:
            if not request.is_last_context_chunk or not request.has_draft_tokens():
                continue
            room = -request.context_chunk_size % unit
            room = min(room, self._max_context_length - request.context_chunk_size, capacity - num_tokens)
            num_tokens += room
            if request.num_draft_tokens > room:
                request._discard_draft_tokens(request.num_draft_tokens - room)


class ReqIdsSet:
    """A bound std::set: no Python set, so it has neither add nor iteration here."""

    def __init__(self):
        self._ids = set()

    def insert(self, request_id):
        self._ids.add(request_id)

    def erase(self, request_id):
        self._ids.discard(request_id)

    def clear(self):
        self._ids.clear()

    def size(self):
        return len(self._ids)

    def __len__(self):
        return len(self._ids)

    def __contains__(self, request_id):
        return request_id in self._ids


BEHAVIORS = {
    f"{_PREFIX}.algorithms.CapacityScheduler": CapacityScheduler,
    f"{_PREFIX}.algorithms.MicroBatchScheduler": MicroBatchScheduler,
    f"{_PREFIX}.batch_manager.LlmRequest": LlmRequest,
    f"{_PREFIX}.batch_manager.KVCacheManager": KVCacheManager,
    f"{_PREFIX}.batch_manager.KvCacheStats": KvCacheStats,
    f"{_PREFIX}.batch_manager.ReqIdsSet": ReqIdsSet,
}
