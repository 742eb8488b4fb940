"""The replayed engines give what was recorded, and a simulation of them repeats itself."""

import numpy as np
import pytest

from benchmarks.replay.__main__ import ratio, row
from benchmarks.replay.engines import ReplayedDraft, prompt_of
from benchmarks.replay.recording import NUM_OUTPUT, PROMPT_LEN, Recording
from benchmarks.replay.simulate import Machine, draw_jobs, open_replay, run_closed_loop
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.executor.stats import StepWatcher
from lab.clock import ManualClock
from lab.reference import draft_stop
from tests.support.executor_harness import toy_costs

K = 4


@pytest.fixture(scope="module")
def recording() -> Recording:
    rng = np.random.default_rng(0)
    num_right = np.minimum(K, rng.geometric(0.3, (6, NUM_OUTPUT)) - 1).astype(np.int32)
    margins = rng.exponential(2.0, (6, NUM_OUTPUT, K)).astype(np.float32)
    return Recording(np.arange(6) >= 3, num_right, margins)


class Watch(StepWatcher):
    """Drafts that passed per step of a request that had all K drafts tested."""

    def __init__(self) -> None:
        self.accepted: list[tuple[str, int, int]] = []

    def step(self, record):
        for i, request in enumerate(record.plan.scheduled.requests):
            if record.drafts.num_new_drafts[i] == K:
                before = request.num_output_tokens - int(record.result.num_tokens[i])
                self.accepted.append((request.request_id, before, int(record.result.num_accepted[i])))


def run(recording, spelling, watch=None):
    jobs, clock = draw_jobs(recording, 20, seed=1), ManualClock()
    with open_replay(recording, Machine.of_table(toy_costs()), spelling, 3, clock) as executor:
        if watch is not None:
            executor.watch(watch)
        rate = run_closed_loop(executor, clock.now_s, jobs, 3, num_warm_up=4)
        executor.check_integrity()
    return rate, jobs


def test_a_recording_is_found_under_the_name_that_it_was_saved_by(recording, tmp_path):
    path = tmp_path / "demo.recording"
    recording.save(path)
    found = Recording.load(path)
    assert found.is_seeded.tolist() == recording.is_seeded.tolist()
    assert found.num_right.tolist() == recording.num_right.tolist()
    assert found.margins.tolist() == recording.margins.tolist()


def test_as_many_drafts_pass_as_were_right(recording):
    watch = Watch()
    _, jobs = run(recording, f"fixed:{K}", watch)
    assert len(watch.accepted) > 100
    for request_id, place, accepted in watch.accepted:
        assert accepted == recording.num_right[jobs[int(request_id)].text, place]


@pytest.mark.parametrize("spelling", ["off", "fixed:2", "price:mode=serial,prune=off"])
def test_a_run_repeats_itself(recording, spelling):
    assert run(recording, spelling) == run(recording, spelling)


def test_a_prompt_says_which_text_answers_it():
    prompts = [tuple(prompt_of(text, PROMPT_LEN)) for text in range(300)]
    assert len(set(prompts)) == 300
    assert {len(prompt) for prompt in prompts} == {PROMPT_LEN}


@pytest.mark.parametrize("seed", range(5))
def test_drafting_ends_as_in_the_reference(seed):
    rng = np.random.default_rng(seed)
    n, k = 6, 5
    stop = DraftStop(
        *(rng.normal(scale, 0.3, (NUM_MODES, k)).astype(np.float32) for scale in (0.5, 0.0)),
        rng.uniform(0.4, 0.7, (NUM_MODES, k)).astype(np.float32),
        rng.uniform(0.0, 0.3, (NUM_MODES, k)).astype(np.float32),
        rng.uniform(0.0, 0.2, k).astype(np.float32),
        np.linspace(0.0, 1.0, n + 1).astype(np.float32),
    )
    mode, margins = rng.integers(0, 2, n).astype(np.int32), rng.exponential(2.0, (n, k)).astype(np.float32)
    pending = rng.integers(0, 2, n).astype(np.int32)
    wanted = np.array([rng.integers(0, k + 1 - p) for p in pending], np.int32)
    drafted = np.zeros(n, np.int32)
    going = [i for i in range(n) if wanted[i]]
    while going:
        drafted[going] += 1
        going = [i for i in going if drafted[i] < wanted[i]]
        seen = [margins[i, : pending[i] + drafted[i]] for i in going]
        on = draft_stop.goes_on(stop, [int(mode[i]) for i in going], seen) if going else []
        going = [i for i, goes in zip(going, on, strict=True) if goes]
    assert ReplayedDraft.num_drafts(stop, mode, margins, pending, wanted).tolist() == drafted.tolist()


def test_the_rival_is_the_best_of_those_that_ran_all_rounds():
    found = {"off": [1.0, 1.0], "fixed:1": [2.0, 4.0], "fixed:2": [9.0], "price": [4.0, 4.0]}
    best, mean, error = row("price", found)
    assert best == "fixed:1"
    assert mean == pytest.approx(2**0.5)
    assert error == pytest.approx(np.log(2.0) / 2.0)
    assert ratio([2.0], [1.0])[0] == pytest.approx(2.0)
