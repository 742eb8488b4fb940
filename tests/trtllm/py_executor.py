"""A PyExecutor over the stand-ins, with TensorRT-LLM's step order and a target that is a function of tokens.

Of a step: the draft length is chosen, each request gets room for as many drafts, the batch is chosen, the drafter
asked, its drafts padded; then the target verifies and the rest of the room is taken back.
"""

from __future__ import annotations

from tests.trtllm import fakes, rules_py

RESOURCES = "tensorrt_llm._torch.pyexecutor.resource_manager"
install = fakes.install


def resource_manager(modules, spec_manager=None, **sizes):
    """The composite that a drafter is given, with the release's default KV cache manager. sizes: of the mapping."""
    kinds = modules[RESOURCES].ResourceManagerType
    mapping = modules["tensorrt_llm.mapping"].Mapping()
    for name, size in sizes.items():
        setattr(mapping, name, size)
    v2 = modules.get(rules_py.KV_CACHE_MANAGER_V2.rpartition(".")[0])
    make = modules[RESOURCES].KVCacheManager if v2 is None else v2.KVCacheManagerV2
    managers = {kinds.KV_CACHE_MANAGER: make(mapping)}
    if spec_manager is not None:
        managers[kinds.SPEC_RESOURCE_MANAGER] = spec_manager
    return modules[RESOURCES].ResourceManager(managers)


class PyExecutor:
    """next_token(tokens) is the target's greedy choice. is_resting(request, step): left out, as if paused.

    resources: what the drafter is given, and told of ends; None: it is given nothing. With a KV cache manager V2, rows
    are booked as its scheduler books them.
    """

    def __init__(
        self,
        modules,
        drafter,
        next_token,
        max_draft_len,
        *,
        max_batch_size=4,
        is_resting=lambda *_: False,
        resources=None,
    ):
        request = modules["tensorrt_llm._torch.pyexecutor.llm_request"]
        self._LlmRequest = request.LlmRequest
        self._get_draft_token_length = request.get_draft_token_length
        self._ScheduledRequests = modules["tensorrt_llm._torch.pyexecutor.scheduler"].ScheduledRequests
        self._State = modules["tensorrt_llm.bindings"].LlmRequestState
        self._SamplingConfig = modules["tensorrt_llm.bindings"].SamplingConfig
        self._drafter = drafter
        self._next_token = next_token
        self._max_draft_len = max_draft_len
        self._max_batch_size = max_batch_size
        self._is_resting = is_resting
        self._resources = resources
        kind = modules[RESOURCES].ResourceManagerType.KV_CACHE_MANAGER
        manager = None if resources is None else resources.get_resource_manager(kind)
        self._v2 = manager if hasattr(manager, "try_allocate_generation") else None
        self.active = []
        self.outputs = {}
        self.proposals = []  # (tokens before, proposal) of every request and step
        self.lengths = {}  # request id -> lengths of its proposals
        self.num_accepted = 0
        self.step_number = 0

    def submit(self, request_id, prompt, max_new_tokens):
        self.active.append(self._LlmRequest(request_id, max_new_tokens, list(prompt), self._SamplingConfig(), False))
        self.outputs[request_id] = []

    def submit_dummy(self, mark):
        """A generation request that pads the batch, as of attention DP or of a CUDA graph."""
        request = self._LlmRequest(1000, 1 << 20, [0], self._SamplingConfig(), False)
        setattr(request, mark, True)
        request.state = self._State.GENERATION_IN_PROGRESS
        self.active.append(request)
        self.outputs[1000] = []
        return request

    def cancel(self, request_id):
        for request in self.active:
            if request.py_request_id == request_id:
                self._free(request)
        self.active = [request for request in self.active if request.py_request_id != request_id]

    def step(self):
        length = self._draft_len()
        self._prepare_draft_requests(length)
        batch = self._schedule()
        if length:
            self._draft(batch)
        else:
            for request in batch.all_requests():
                request.py_disable_speculative_decoding = True
        for request in batch.context_requests:
            self._take(request, [self._next_token(request.get_tokens(0))])
            request.state = self._State.GENERATION_IN_PROGRESS
        for request in batch.generation_requests:
            self._verify(request)
        if self._v2 is not None:
            self._v2.update_resources(batch)
        for request in self.active:
            if self._is_done(request):
                self._free(request)
        self.active = [request for request in self.active if not self._is_done(request)]
        self.step_number += 1

    def _draft_len(self):
        """Drafts per request in this step, by the drafter's schedule and its limit of requests; 0: it is not asked."""
        length = self._max_draft_len
        if getattr(self._drafter, "draft_len_schedule", None) is not None:
            length = self._drafter.get_draft_len_for_batch_size(max(1, len(self.active)))
            self._drafter.update_max_total_draft_tokens(length)
        limit = getattr(self._drafter, "max_concurrency", None)
        if limit is not None and not self._drafter.should_use_spec_decode(
            self.active, self._max_batch_size, 1 << 20, length
        ):
            return 0
        return length

    def _draft(self, batch):
        given = () if self._resources is None else (batch, self._resources)
        self._drafter.prepare_draft_tokens(*(given or (batch,)))
        for request in batch.generation_requests:
            proposal = list(request.py_draft_tokens)
            assert self._get_draft_token_length(request) <= request.py_draft_pages_allocated
            assert all(type(token) is int for token in proposal)
            self.proposals.append((request.get_tokens(0), proposal))
            self.lengths.setdefault(request.py_request_id, []).append(len(proposal))
        takes_manager = hasattr(self._drafter, "_needs_padding_kv_extension") and not hasattr(
            self._drafter, "run_drafter_post"
        )
        self._drafter.pad_draft_tokens_for_cuda_graph(*(given if takes_manager and given else (batch,)))
        for request in batch.generation_requests:
            has_room = self._get_draft_token_length(request) <= request.py_draft_pages_allocated
            assert has_room or not takes_manager or self._v2 is not None  # which counts rows itself

    def _free(self, request):
        if self._resources is not None:
            self._resources.free_resources(request)

    def run(self, num_steps=10_000):
        while self.active and num_steps:
            self.step()
            num_steps -= 1
        assert not self.active, "requests never end"

    def _prepare_draft_requests(self, length):
        for request in self.active:
            if request.state is self._State.GENERATION_IN_PROGRESS:
                room = 0 if request.py_disable_speculative_decoding else length
                if hasattr(request, "draft_tokens"):
                    request.draft_tokens = [0] * length
                request.py_last_draft_tokens = request.py_draft_tokens
                request.py_draft_tokens = [0] * room
                request.py_draft_pages_allocated = room

    def _schedule(self):
        batch = self._ScheduledRequests()
        for request in self.active:
            if batch.batch_size == self._max_batch_size:
                break
            if request.state is self._State.CONTEXT_INIT:
                getattr(batch, "context_requests_last_chunk", batch.context_requests).append(request)
            elif self._is_resting(request, self.step_number):
                if self._v2 is not None:
                    self._v2.suspend_request(request)
            elif self._v2 is None or self._v2.try_allocate_generation(request):
                batch.generation_requests.append(request)
        return batch

    def _verify(self, request):
        """The longest prefix of the padded drafts that the target says too, and the token that it says next."""
        assert self._get_draft_token_length(request) in (0, self._max_draft_len)
        tokens, new = request.get_tokens(0), []
        for draft in [*request.py_draft_tokens, None]:
            new.append(self._next_token(tokens + new))
            if draft != new[-1]:
                break
        request.py_num_accepted_draft_tokens = len(new) - 1
        room = request.py_draft_pages_allocated if self._v2 is None else self._get_draft_token_length(request)
        request.py_rewind_len = room - request.py_num_accepted_draft_tokens
        self.num_accepted += request.py_num_accepted_draft_tokens
        self._take(request, new)
        if self._is_done(request):
            request.state = self._State.GENERATION_COMPLETE

    def _take(self, request, new):
        for token in new[: self._left(request)]:
            request.add_new_token(token, 0)
            self.outputs[request.py_request_id].append(token)

    def _left(self, request):
        return request.max_new_tokens - len(self.outputs[request.py_request_id])

    def _is_done(self, request):
        return self._left(request) <= 0
