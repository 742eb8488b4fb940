"""A drafter that raises, lies or gives rubbish costs speed, not text."""

from dataclasses import replace

import numpy as np
import pytest

from faser_trtllm import native
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.drafters.base import DrafterSpec, nothing_drafted
from faser_trtllm.errors import FaserError
from tests.drafters.driving import drive
from tests.support.columns import columns
from tests.support.executor_harness import Setup, run
from tests.support.random_setups import POLICIES, VOCAB, greedy_reference

REQUESTS = [
    ([1, 2, 3], SamplingParams(max_tokens=50)),
    ([4, 0, 4, 0], SamplingParams(max_tokens=50, temperature=1.0, seed=7)),
    ([2, 2, 2, 2], SamplingParams(max_tokens=50, temperature=1.5, seed=8, repetition_penalty=1.2)),
]


class Rubbish:
    """In place of the suffix drafter: as many tokens as fit, drawn at random, whatever the text."""

    spec = DrafterSpec("suffix", has_kv=False)

    def __init__(self, inner, fault=""):
        self._rng = np.random.default_rng(5)
        self._fault = fault
        self.num_proposed = 0

    def propose(self, plan, num_pending):
        if self._fault == "raises":
            raise RuntimeError("out of ideas")
        drafted = []
        for index, scheduled in enumerate(plan.scheduled):
            request = scheduled.request
            first = request.num_tokens + int(num_pending[index])
            wanted = max(0, request.num_tokens + scheduled.num_drafts - first) if request.is_decoding else 0
            request.tokens[first : first + wanted] = self._rng.integers(0, VOCAB, wanted)
            if self._fault == "outside" and wanted:
                request.tokens[first] = VOCAB
            request.draft_sources[first : first + wanted] = native.BY_SUFFIX
            request.draft_margins[first : first + wanted] = self._rng.normal(0, 5, wanted)
            drafted.append(wanted + (self._fault == "too many" and wanted > 0))
        self.num_proposed += sum(drafted)
        (counts,) = columns(drafted)
        return replace(nothing_drafted(plan), num_new_drafts=counts, num_free=counts)

    def end(self, slot):
        pass


def texts(setup):
    return run(setup, REQUESTS).tokens


def plain(setup):
    alone = Setup(vocab_size=VOCAB, table_seed=setup.table_seed, max_batch_size=1)
    found = {str(index): run(alone, [request]).tokens["0"] for index, request in enumerate(REQUESTS)}
    assert found["0"] == greedy_reference(setup.target.table, *REQUESTS[0][:1], 50)
    return found


@pytest.mark.parametrize("policy", sorted(set(POLICIES)))
@pytest.mark.parametrize("drafters", ["suffix", "suffix,model"])
def test_rubbish_changes_no_token(policy, drafters):
    made = []
    setup = Setup(
        policy=policy,
        drafters=drafters,
        wrap_drafter=lambda d: made.append(Rubbish(d)) or made[-1] if d.spec.name == "suffix" else d,
    )
    assert texts(setup) == plain(setup)
    if not policy.startswith("schedule"):  # which finds that nothing pays
        assert made[0].num_proposed > 0, "nothing was proposed, so this tests nothing"


@pytest.mark.parametrize("fault", ["raises", "outside", "too many"])
@pytest.mark.parametrize("drafters", ["suffix", "suffix,model"])
def test_a_fault_turns_speculation_off_for_a_while(fault, drafters):
    setup = Setup(
        policy="fixed:3",
        drafters=drafters,
        faults="draft_error@step100000",  # never, but a service's guard is there
        wrap_drafter=lambda d: Rubbish(d, fault) if d.spec.name == "suffix" else d,
    )
    tokens, stats = drive(setup, REQUESTS)
    assert tokens == plain(setup)
    assert stats["num_spec_fallbacks_draft_error"] == 1
    assert stats["num_draft_tokens"] == 0


@pytest.mark.parametrize(("fault", "says"), [("outside", "vocabulary of 5"), ("too many", "4 drafts where 3 fit")])
def test_without_a_guard_the_fault_is_named(fault, says):
    setup = Setup(policy="fixed:3", drafters="suffix", wrap_drafter=lambda d: Rubbish(d, fault))
    with pytest.raises(FaserError, match=says):
        texts(setup)
