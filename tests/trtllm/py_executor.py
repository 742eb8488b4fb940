"""A PyExecutor over the stand-ins, with the step order of TensorRT-LLM 1.2 and a target that is a function of tokens.

Of a step: each request gets room for max_draft_len drafts, the batch is chosen, the drafter asked, its drafts padded;
then the target verifies and the rest of the room is taken back.
"""

from __future__ import annotations

from tests.trtllm import fakes

DRAFTER = "tensorrt_llm._torch.speculative.drafter.Drafter"


class DrafterRules:
    """What the base class does of itself: it remembers its arguments, and pads to the static maximum."""

    def __init__(self, max_draft_len, max_total_draft_tokens, max_concurrency, draft_len_schedule):
        self.max_draft_len = max_draft_len
        self.max_total_draft_tokens = self._static_max = max_total_draft_tokens
        self.max_concurrency = max_concurrency
        self.draft_len_schedule = draft_len_schedule

    def pad_draft_tokens_for_cuda_graph(self, scheduled_requests):
        for request in scheduled_requests.generation_requests:
            request.py_draft_tokens.extend([0] * (self._static_max - len(request.py_draft_tokens)))


def install(monkeypatch, **options):
    return fakes.install(monkeypatch, behaviours={DRAFTER: DrafterRules}, **options)


class PyExecutor:
    """next_token(tokens) is the target's greedy choice. is_resting(request, step): left out, as if paused."""

    def __init__(self, modules, drafter, next_token, max_draft_len, *, max_batch_size=4, is_resting=lambda *_: False):
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
        self.active = []
        self.outputs = {}
        self.proposals = []  # (tokens before, proposal) of every request and step
        self.lengths = {}  # request id -> lengths of its proposals
        self.num_accepted = 0
        self.step_number = 0

    def submit(self, request_id, prompt, max_new_tokens):
        self.active.append(self._LlmRequest(request_id, max_new_tokens, list(prompt), self._SamplingConfig(), False))
        self.outputs[request_id] = []

    def cancel(self, request_id):
        self.active = [request for request in self.active if request.py_request_id != request_id]

    def step(self):
        self._prepare_draft_requests()
        batch = self._schedule()
        self._drafter.prepare_draft_tokens(batch)
        for request in batch.generation_requests:
            proposal = list(request.py_draft_tokens)
            assert self._get_draft_token_length(request) <= request.py_draft_pages_allocated
            assert all(type(token) is int for token in proposal)
            self.proposals.append((request.get_tokens(0), proposal))
            self.lengths.setdefault(request.py_request_id, []).append(len(proposal))
        self._drafter.pad_draft_tokens_for_cuda_graph(batch)
        for request in batch.context_requests:
            self._take(request, [self._next_token(request.get_tokens(0))])
            request.state = self._State.GENERATION_IN_PROGRESS
        for request in batch.generation_requests:
            self._verify(request)
        self.active = [request for request in self.active if not self._is_done(request)]
        self.step_number += 1

    def run(self, num_steps=10_000):
        while self.active and num_steps:
            self.step()
            num_steps -= 1
        assert not self.active, "requests never end"

    def _prepare_draft_requests(self):
        for request in self.active:
            if request.state is self._State.GENERATION_IN_PROGRESS:
                request.draft_tokens = [0] * self._max_draft_len
                request.py_last_draft_tokens = request.py_draft_tokens
                request.py_draft_tokens = [0] * self._max_draft_len
                request.py_draft_pages_allocated = self._max_draft_len

    def _schedule(self):
        batch = self._ScheduledRequests()
        for request in self.active:
            if batch.batch_size == self._max_batch_size:
                break
            if request.state is self._State.CONTEXT_INIT:
                batch.context_requests.append(request)
            elif not self._is_resting(request, self.step_number):
                batch.generation_requests.append(request)
        return batch

    def _verify(self, request):
        """The longest prefix of the padded drafts that the target says too, and the token that it says next."""
        assert self._get_draft_token_length(request) == self._max_draft_len
        tokens, new = request.get_tokens(0), []
        for draft in [*request.py_draft_tokens, None]:
            new.append(self._next_token(tokens + new))
            if draft != new[-1]:
                break
        request.py_num_accepted_draft_tokens = len(new) - 1
        request.py_rewind_len = request.py_draft_pages_allocated - request.py_num_accepted_draft_tokens
        self.num_accepted += request.py_num_accepted_draft_tokens
        self._take(request, new)

    def _take(self, request, new):
        for token in new[: self._left(request)]:
            request.add_new_token(token, 0)
            self.outputs[request.py_request_id].append(token)

    def _left(self, request):
        return request.max_new_tokens - len(self.outputs[request.py_request_id])

    def _is_done(self, request):
        return self._left(request) <= 0
