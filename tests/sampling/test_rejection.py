"""The samplers of both kinds of memory: the same tokens, from the same rows. tests/ops has the op's exactness."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

from benchmarks.gpu.dry_gpu import HostRuntime
from benchmarks.gpu.reference_ops import ReferenceOps
from faser_trtllm import native
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.sampler import accept
from faser_trtllm.engine.gpu.sampler.accept import GpuRejectionSampler
from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs
from faser_trtllm.engine.gpu.sampler.logits import DeviceLogits
from faser_trtllm.ops.accept import Outcome, RowStatus
from faser_trtllm.sampling.draft_probs import HostDraftProbs
from faser_trtllm.sampling.rejection import BranchTokens, CpuRejectionSampler, VerificationRows
from faser_trtllm.sampling.table import SamplingTable
from tests.engine.cuda.harness import WHOLE, emulated_rows

VOCAB, MAX_DRAFT_LEN, NUM_SLOTS = 300, 3, 6


class Target:
    """An engine's part of a sampler, whose pass took 5 ms."""

    spec = EngineSpec(VOCAB, 64, 1, 8, 16, 64, NUM_SLOTS - 2, (0, 1), max_num_branches=2)
    partition = WHOLE

    def __init__(self):
        self.runtime = HostRuntime()

    def pass_ms(self):
        return 5.0


class Case:
    """Requests in slots 0, 1, ... with pending drafts, and the sampler that verifies them. Two binds in turn have the
    same key."""

    def __init__(self, kind: str) -> None:
        keys, sizes = itertools.count(), (NUM_SLOTS, MAX_DRAFT_LEN, VOCAB)
        self.rows, self.requests, self._on_device = [], [], kind != "cpu"
        if kind == "cpu":
            self.sampler = CpuRejectionSampler(VOCAB, MAX_DRAFT_LEN, HostDraftProbs(*sizes))
        else:
            ops = ReferenceOps()
            if kind == "kernels":
                ops.accept = Ops({"accept": emulated_rows("accept")}, lambda: 0, num_sms=4).accept
            draft_probs = DeviceDraftProbs(HostRuntime(), WHOLE, *sizes)
            self.sampler = GpuRejectionSampler(Target(), ops, MAX_DRAFT_LEN, draft_probs)
        self.table = SamplingTable(
            NUM_SLOTS, VOCAB, MAX_DRAFT_LEN, new_key=lambda: next(keys) // 2, draft_probs=self.sampler.draft_probs
        )

    def add(self, prompt, drafts, num_rows, **params) -> Request:
        request = Request(
            str(prompt), prompt, SamplingParams(max_tokens=9, **params), max_seq_len=64, max_draft_len=MAX_DRAFT_LEN
        )
        request.tokens[len(prompt) : len(prompt) + len(drafts)] = drafts
        self.table.bind(len(self.requests), request)
        self.rows.append((len(self.requests), num_rows, len(prompt), len(drafts)))
        self.requests.append(request)
        return request

    def sample(self, says, branches=()):
        """says: of each row of logits, the tokens from the most probable one on; none: NaN. branches: each a request, a
        place and a token."""
        logits = np.zeros((len(says), VOCAB), np.float32)
        for row, tokens in enumerate(says):
            logits[row, tokens or ...] = 9.0 - np.arange(len(tokens)) if tokens else np.nan
        return self.run(logits, branches)

    def run(self, logits, branches=()):
        verified = VerificationRows.of(*zip(*self.rows, strict=True))
        added = BranchTokens(*np.array(branches, np.int32).T.copy()) if branches else None
        given = DeviceLogits(torch.from_numpy(logits)) if self._on_device else logits
        return self.sampler.sample(self.table.array, given, verified, added)


@pytest.fixture(params=["cpu", "references", "kernels"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def committed(found) -> list[list[int]]:
    return [row[:count].tolist() for row, count in zip(found.token_ids, found.num_tokens, strict=True)]


def test_drafts_are_accepted_recovered_followed_by_a_bonus_or_still_pending(case: Case) -> None:
    case.add([1], [5, 6], 3)
    case.add([2], [5, 6], 3)
    case.add([3], [5, 6], 2)
    found = case.sample([[5], [7], [8], [5], [6], [9], [5], [6]])
    assert committed(found) == [[5, 7], [5, 6, 9], [5, 6]]
    assert found.num_accepted.tolist() == [1, 2, 2]
    assert [Outcome(outcome).name for outcome in found.outcome] == ["RECOVERED", "BONUS", "STILL_PENDING"]
    assert case.table.tests(native.BY_MODEL) == (6, 5)


def test_a_request_without_rows_takes_no_part(case: Case) -> None:
    """Whatever else it has: edits, a mask, drafts that wait."""
    case.add([1], [5, 6], 3)
    case.add([2], [5], 0, repetition_penalty=2.0, bad_words=((4,),), logit_bias=((5, 1.0),))
    case.add([3], [], 0)
    mask = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    case.table.array["masks"][2], case.table.array["num_mask_rows"][2] = mask.ctypes.data, 1
    case.add([4], [6], 2, presence_penalty=2.0)
    found = case.sample([[5], [6], [7], [6], [6, 8]])
    assert committed(found) == [[5, 6, 7], [], [], [6, 8]]
    assert [Outcome(outcome).name for outcome in found.outcome] == ["BONUS", "STILL_PENDING", "STILL_PENDING", "BONUS"]
    assert case.table.array["num_tested"].sum(1).tolist() == [2, 0, 0, 1, 0, 0]


def test_a_branch_that_is_recovered_gives_its_token_and_is_history_to_it(case: Case) -> None:
    """In the place of the draft: a penalty falls on the branch's token, and not on the draft's."""
    request = case.add([1, 2, 3], [10, 11], 3, temperature=0.0, frequency_penalty=5.0)
    says = [[20], [11], [12], [20, 10, 30], [1, 40]]
    found = case.sample(says, [(0, 0, 20), (0, 1, 12)])
    assert (committed(found), found.num_accepted.tolist(), found.followed.tolist()) == ([[20, 10]], [0], [0])
    assert found.outcome.tolist() == [Outcome.RECOVERED]
    assert request.tokens[3:5].tolist() == [10, 11], "the request is the scheduler's"
    assert case.table.tests(native.BY_MODEL) == (1, 0)
    assert committed(case.sample(says)) == [[20]]


def test_branches_of_other_tokens_and_other_places_give_nothing(case: Case) -> None:
    case.add([1], [10, 11], 3)
    case.add([2], [], 1)
    found = case.sample([[10], [21], [5], [7], [8], [9]], [(0, 0, 21), (0, 1, 20)])
    assert (committed(found), found.followed.size) == ([[10, 21], [7]], 0)


def test_a_branch_whose_row_has_no_distribution_gives_nothing(case: Case) -> None:
    case.add([1], [10], 2)
    found = case.sample([[20], [5], []], [(0, 0, 20)])
    assert (committed(found), found.outcome.tolist(), found.followed.size) == ([[20]], [Outcome.RECOVERED], 0)


def test_nan_logits_fail_the_request_alone(case: Case) -> None:
    case.add([1], [5], 2)
    case.add([2], [5], 2)
    found = case.sample([[5], [], [5], [6]])
    assert committed(found) == [[5], [5, 6]]
    assert found.outcome.tolist() == [Outcome.FAILED, Outcome.BONUS]
    assert found.row_status.tolist() == [RowStatus.NAN, RowStatus.OK]


def test_drafts_of_a_preempted_request_keep_their_distributions(case: Case) -> None:
    """Verified in another slot, after others have used its own, they are judged as they would have been before."""
    rng, found = np.random.default_rng(5), []

    def judged(slot, logits, q=None):
        if q is not None:
            np.asarray(case.table.draft_probs.rows(slot))[:] = q
        case.rows = [(slot, 4, 3, 3)]
        return committed(case.run(logits))[0]

    for _ in range(30):
        case.rows, case.requests = [], []
        request = case.add([1, 2, 0], rng.integers(0, 3, 3), 4, temperature=1.2)
        q = np.zeros((MAX_DRAFT_LEN, VOCAB), np.float32)
        q[:, :3] = rng.dirichlet(np.ones(3), MAX_DRAFT_LEN)
        logits = np.full((4, VOCAB), -np.inf, np.float32)
        logits[:, :3] = rng.standard_normal((4, 3))
        first = judged(0, logits, q)
        case.table.park(0, request)
        case.table.release(0)
        np.asarray(case.table.draft_probs.rows(0))[:] = 1 / VOCAB
        case.table.bind(2, request)
        found.append((first, judged(2, logits), judged(2, logits, 1 / VOCAB)))
    assert [again for _, again, _ in found] == [first for first, _, _ in found]
    assert [wrong for *_, wrong in found] != [first for first, *_ in found]


def test_fewer_logits_than_rows_are_refused(case: Case) -> None:
    case.add([1], [5], 2)
    with pytest.raises(ValueError, match="2 rows are to be verified, logits has 1"):
        case.sample([[5]])


def test_a_pass_takes_the_host_s_time_or_the_device_s() -> None:
    assert Case("cpu").sampler.pass_ms(2.0, 0.5) == 2.5
    on_device = Case("references").sampler
    assert [on_device.pass_ms(forward_ms, 0.5) for forward_ms in (2.0, 7.0)] == [5.0, 7.0]


def _noting(sizes: list[int], accept, sampling, slots, logits, *inputs, **options) -> None:
    sizes.append(logits.shape[0])
    accept(sampling, slots, logits, *inputs, **options)


@pytest.mark.parametrize("kind", ["references", "kernels"])
def test_edited_requests_verified_in_pieces_get_the_same_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of at most 4 rows: of whole requests, some without rows, and of branches."""
    logits, found, sizes = np.random.default_rng(1).standard_normal((11, VOCAB), np.float32), [], []
    for most in (256, MAX_DRAFT_LEN + 1):
        monkeypatch.setattr(accept, "_EDITED_ROWS", most)
        case = Case(kind)
        case.sampler._ops.accept = functools.partial(_noting, sizes, case.sampler._ops.accept)
        case.add([1, 2], [int(logits[0].argmax()), 6], 3, frequency_penalty=0.1)
        case.add([3], [5, 6, 7], 4, temperature=0.8, seed=3, logit_bias=((9, 2.0),))
        case.add([4], [5], 0)
        case.add([5, 6], [8], 2, temperature=0.9)
        branches = [(0, 1, int(logits[1].argmax())), (3, 0, int(logits[7].argmax()))]
        result = case.run(logits, branches)
        found.append([*committed(result), result.outcome.tolist(), result.followed.tolist()])
    assert found[0] == found[1]
    assert found[0][-1], "a branch gave a token"
    assert sizes == [11, 3, 4, 4]
