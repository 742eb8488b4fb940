"""Plain versions of TensorRT-LLM's Python classes around a drafter, for the generated stand-ins; by release."""

from __future__ import annotations

_TORCH = "tensorrt_llm._torch"
_RESOURCES = f"{_TORCH}.pyexecutor.resource_manager"
_BOUND = "tensorrt_llm.bindings.internal.batch_manager"
KV_CACHE_MANAGER_V2 = f"{_TORCH}.pyexecutor.kv_cache.kv_cache_manager_v2.KVCacheManagerV2"
DRAFTER = f"{_TORCH}.speculative.drafter.Drafter"
LLM = "tensorrt_llm.llmapi.LLM"
SERVER = "tensorrt_llm.serve.OpenAIServer"


class PyLlmRequest:
    """The Python request over the bindings': draft attributes as its __init__ leaves them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.py_request_id = self.request_id
        self.py_prompt_len = self.py_orig_prompt_len = self.prompt_len
        self.py_max_new_tokens = self.max_new_tokens
        self.py_draft_tokens = []
        self.py_draft_pages_allocated = self.py_num_accepted_draft_tokens = self.py_rewind_len = 0
        self.py_num_accepted_draft_tokens_indices = []
        self.py_decoding_iter = 0
        self.py_last_draft_tokens = self.py_draft_logits = self.py_target_probs = self.py_batch_idx = None
        self.py_end_id = self.py_seq_slot = self.py_target_seq_slot = None
        self.py_is_draft = self.py_disable_speculative_decoding = False
        self.is_attention_dp_dummy = self.is_cuda_graph_dummy = self.is_dummy_request = False


class LeanLlmRequest:
    """The bound request of 1.4, as far as anything here needs it."""

    def __init__(self, request_id, max_new_tokens, input_tokens, sampling_config, is_streaming):
        self.request_id = request_id
        self.prompt_len = len(input_tokens)
        self.max_new_tokens = max_new_tokens
        self.state = self._package["tensorrt_llm.bindings.LlmRequestState"].CONTEXT_INIT
        self._tokens = list(input_tokens)

    def get_tokens(self, beam):
        return list(self._tokens)

    def add_new_token(self, token, beam):
        self._tokens.append(token)


class LeanPyLlmRequest:
    """The Python request of 1.4: nothing that FaserDrafter does not use."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.py_request_id = self.request_id
        self.py_orig_prompt_len = self.prompt_len
        self.py_max_new_tokens = self.max_new_tokens
        self.py_draft_tokens = []
        self.py_draft_pages_allocated = 0
        self.py_disable_speculative_decoding = False
        self.is_attention_dp_dummy = self.is_cuda_graph_dummy = self.is_dummy_request = False


class ScheduledRequests:
    def __init__(self):
        self.context_requests, self.generation_requests, self.paused_requests = [], [], []

    @property
    def batch_size(self):
        return len(self.context_requests) + len(self.generation_requests)

    @property
    def is_generation_only(self):
        return not self.context_requests and not any(r.draft_tokens for r in self.generation_requests)

    @property
    def can_run_cuda_graph(self):
        return not self.context_requests

    def all_requests(self):
        return self.context_requests + self.generation_requests


class SplitScheduledRequests:
    """Since 1.3: contexts that go on and those that end are two lists, and one property."""

    def __init__(self):
        self.context_requests_chunking, self.context_requests_last_chunk = [], []
        self.generation_requests, self.paused_requests = [], []

    @property
    def context_requests(self):
        return self.context_requests_chunking + self.context_requests_last_chunk

    @property
    def batch_size(self):
        return len(self.context_requests) + len(self.generation_requests)

    def all_requests(self):
        return self.context_requests + self.generation_requests


def get_draft_token_length(request):
    return len(request.py_draft_tokens or [])


class Drafter:
    """The base class's own behavior: it remembers its arguments, chooses by a schedule, and pads."""

    def __init__(self, max_draft_len, max_total_draft_tokens, max_concurrency, draft_len_schedule):
        self.max_draft_len = max_draft_len
        self.max_total_draft_tokens = self._static_max = max_total_draft_tokens
        self.max_concurrency = max_concurrency
        self.draft_len_schedule = draft_len_schedule

    def should_use_spec_decode(self, requests, max_batch_size, max_num_tokens, max_total_draft_tokens):
        if self.max_concurrency is None:
            return True
        fitting = min(len(requests), max_batch_size, max_num_tokens // (1 + max_total_draft_tokens))
        return 0 < fitting <= self.max_concurrency

    def get_draft_len_for_batch_size(self, batch_size):
        return self.draft_len_schedule[max(size for size in self.draft_len_schedule if size <= batch_size)]

    def update_max_total_draft_tokens(self, new_max_total_draft_tokens):
        self.max_draft_len = self.max_total_draft_tokens = new_max_total_draft_tokens

    def pad_draft_tokens_for_cuda_graph(self, scheduled_requests):
        for request in scheduled_requests.generation_requests:
            request.py_draft_tokens.extend([0] * (self._static_max - len(request.py_draft_tokens)))


class PostDrafter(Drafter):
    """1.2 asks once more after the target's pass."""

    def run_drafter_post(self, scheduled_requests, resource_manager, is_warmup):
        pass


class ExtendingDrafter(Drafter):
    """Since 1.3: pages of the padding are asked for where the drafter says so."""

    _needs_padding_kv_extension = False

    def pad_draft_tokens_for_cuda_graph(self, scheduled_requests, resource_manager):
        super().pad_draft_tokens_for_cuda_graph(scheduled_requests)
        if self._needs_padding_kv_extension and resource_manager is not None:
            kind = self._package[f"{_RESOURCES}.ResourceManagerType"].KV_CACHE_MANAGER
            for request in scheduled_requests.generation_requests:
                resource_manager.get_resource_manager(kind).extend_capacity_for_tokens(request)


class BaseResourceManager:
    """Nothing happens unless a manager says otherwise."""

    def add_dummy_requests(self, request_ids):
        pass

    def prepare_resources(self, scheduled_batch):
        pass

    def update_resources(self, scheduled_batch):
        pass

    def free_resources(self, request):
        pass

    def shutdown(self):
        pass


class Mapping:
    tp_size = pp_size = cp_size = 1


class KVCacheManager:
    """The cache manager of the Python side: pages per request, as far as the drafter sees them."""

    def __init__(self, mapping=None):
        self.mapping = mapping or Mapping()


class ExtendingKVCacheManager(KVCacheManager):
    def extend_capacity_for_tokens(self, request):
        request.py_draft_pages_allocated = max(request.py_draft_pages_allocated, len(request.py_draft_tokens))


class KVCacheManagerV2:
    """Since 1.4.0rc1: rows per request, booked by the scheduler for the drafts of a step and, after it, for padding.

    A paused request keeps its rows. update_resources takes back those of rejected drafts, and checks that as many are
    left as the request has tokens with keys and values.
    """

    def __init__(self, mapping=None):
        self.mapping = mapping or Mapping()
        self._rows, self._booked, self._suspended = {}, {}, set()

    def try_allocate_generation(self, req):
        draft_len = get_draft_token_length(req)
        self._suspended.discard(req.py_request_id)
        self._booked[req.py_request_id] = draft_len
        self._rows.setdefault(req.py_request_id, len(req.get_tokens(0)) - 1)
        self._rows[req.py_request_id] += 1 + draft_len
        return True

    def extend_capacity_for_tokens(self, request):
        booked = self._booked.pop(request.py_request_id)
        self._rows[request.py_request_id] += max(0, get_draft_token_length(request) - booked)

    def suspend_request(self, req):
        self._suspended.add(req.py_request_id)

    def update_resources(self, scheduled_batch):
        for request in scheduled_batch.generation_requests:
            if request.state.name != "GENERATION_COMPLETE":
                assert request.py_request_id not in self._suspended
                self._rows[request.py_request_id] -= request.py_rewind_len
                assert self._rows[request.py_request_id] == len(request.get_tokens(0)) - 1

    def free_resources(self, request):
        self._rows.pop(request.py_request_id, None)


class ResourceManager:
    """managers: by their kind. A request that ends, or is paused, is freed in all of them."""

    def __init__(self, managers):
        self._managers = managers

    def get_resource_manager(self, kind):
        return self._managers.get(kind)

    def free_resources(self, request):
        for manager in reversed(self._managers.values()):
            if hasattr(manager, "free_resources"):
                manager.free_resources(request)


def behaviors(release):
    """Return the behaviors of a release by the recorded names."""
    is_new = release != "1.2"
    is_newest = release == "1.4"
    newest = {f"{_BOUND}.LlmRequest": LeanLlmRequest, KV_CACHE_MANAGER_V2: KVCacheManagerV2} if is_newest else {}
    return newest | {
        f"{_TORCH}.pyexecutor.llm_request.LlmRequest": LeanPyLlmRequest if is_newest else PyLlmRequest,
        f"{_TORCH}.pyexecutor.llm_request.get_draft_token_length": get_draft_token_length,
        f"{_TORCH}.pyexecutor.scheduler.ScheduledRequests": SplitScheduledRequests if is_new else ScheduledRequests,
        f"{_RESOURCES}.BaseResourceManager": BaseResourceManager,
        f"{_RESOURCES}.KVCacheManager": ExtendingKVCacheManager if is_new else KVCacheManager,
        f"{_RESOURCES}.ResourceManager": ResourceManager,
        "tensorrt_llm.mapping.Mapping": Mapping,
        DRAFTER: ExtendingDrafter if is_new else PostDrafter,
    }
