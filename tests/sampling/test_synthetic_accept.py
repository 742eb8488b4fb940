"""Synthetic acceptance takes drafts at random and draws what follows from the target's distribution."""

from __future__ import annotations

import numpy as np
import pytest

from faser_trtllm import native
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.ops.accept import Outcome
from faser_trtllm.sampling.draft_probs import HostDraftProbs
from faser_trtllm.sampling.rejection import CpuRejectionSampler, VerificationRows
from faser_trtllm.sampling.synthetic_accept import SyntheticRejectionSampler, place_probabilities
from faser_trtllm.sampling.table import SamplingTable

VOCAB, MAX_DRAFT_LEN = 16, 4


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [
        (0.0, [0, 0, 0, 0]),
        (2.5, [1, 1, 0.5, 0]),
        (4, [1, 1, 1, 1]),
        (9.0, [1, 1, 1, 1]),
        ([0.9, 0.5], [0.9, 0.5, 0, 0]),
        ((1.0, 0.5, 0.2, 0.1, 0.7), [1, 0.5, 0.2, 0.1]),
    ],
)
def test_a_number_is_a_mean_and_a_list_is_per_place(acceptance, expected):
    assert place_probabilities(acceptance, MAX_DRAFT_LEN).tolist() == expected


class Case:
    """Requests with pending drafts; the target's argmax of row r of all rows is r % VOCAB."""

    def __init__(self, probabilities, seed=7):
        self.table = SamplingTable(64, VOCAB, MAX_DRAFT_LEN)
        sampler = CpuRejectionSampler(VOCAB, MAX_DRAFT_LEN, HostDraftProbs(64, MAX_DRAFT_LEN, VOCAB))
        self.sampler = SyntheticRejectionSampler(sampler, np.array(probabilities), seed)
        self.requests, self.num_rows, self.added = [], 0, []

    def add(self, prompt, drafts, num_rows):
        request = Request(
            str(prompt), prompt, SamplingParams(max_tokens=50), max_seq_len=99, max_draft_len=MAX_DRAFT_LEN
        )
        request.tokens[len(prompt) : len(prompt) + len(drafts)] = drafts
        slot = len(self.requests)
        self.table.bind(slot, request)
        self.added.append((slot, num_rows, len(prompt), len(drafts)))
        self.requests.append(request)
        self.num_rows += num_rows

    def run(self):
        logits = np.zeros((self.num_rows, VOCAB), np.float32)
        logits[np.arange(self.num_rows), np.arange(self.num_rows) % VOCAB] = 9.0
        return self.sample(logits)

    def sample(self, logits):
        return self.sampler.sample(self.table.array, logits, VerificationRows.of(*zip(*self.added, strict=True)))


def test_outcomes_are_those_of_rejection_sampling():
    case = Case([1, 1, 0, 0])
    case.add([1], [5, 6, 7], 4)  # rows 0 to 3: the third draft is rejected on row 2
    case.add([2], [5, 6], 3)  # rows 4 to 6: all accepted, a bonus on row 6
    case.add([3], [5, 6], 2)  # rows 7 and 8: both tested, no row left to draw from
    case.add([4], [], 1)  # row 9: nothing pending
    result = case.run()
    assert [Outcome(o) for o in result.outcome] == [
        Outcome.RECOVERED,
        Outcome.BONUS,
        Outcome.STILL_PENDING,
        Outcome.BONUS,
    ]
    assert result.num_accepted.tolist() == [2, 2, 2, 0]
    assert result.num_tokens.tolist() == [3, 3, 2, 1]
    assert case.table.tests(native.BY_MODEL) == (7, 6)
    committed = [row[:count].tolist() for row, count in zip(result.token_ids, result.num_tokens, strict=True)]
    assert committed == [[5, 6, 2], [5, 6, 6], [5, 6], [9]]
    assert all(array.dtype == np.int32 for array in (result.token_ids, result.num_tokens, result.outcome))


def test_acceptance_is_a_function_of_seed_prompt_and_position():
    def accepted(prompts, seed):
        case = Case([0.5] * 4, seed)
        for prompt in prompts:
            case.add(prompt, [5, 6, 7, 8], 5)
        return dict(zip(map(tuple, prompts), case.run().num_accepted.tolist(), strict=True))

    prompts = [[i, i + 1] for i in range(32)]
    whole = accepted(prompts, 1)
    assert accepted(prompts[20:4:-3], 1).items() <= whole.items()
    assert accepted(prompts, 2) != whole
    assert len(set(whole.values())) == 5


def test_what_fails_is_told():
    case = Case([1, 0, 0, 0])
    case.add([1], [5, 6], 3)
    logits = np.full((3, VOCAB), np.nan, np.float32)
    result = case.sample(logits)
    assert Outcome(result.outcome[0]) is Outcome.FAILED
    assert result.num_tokens.tolist() == [1]
    assert result.row_status[0] != 0
