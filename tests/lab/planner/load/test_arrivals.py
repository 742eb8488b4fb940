"""Generated arrivals have the statistics that they are asked for; a CSV file is read as its columns are named."""

import itertools

import numpy as np
import pytest

from faser_trtllm.errors import InvalidArgumentError
from lab.planner.load.arrivals import TRACES, generated_arrivals, read_arrivals

AZURE = TRACES["azure"]


def test_a_seed_repeats_itself_and_times_rise():
    first, again, other = (list(generated_arrivals(AZURE, 5.0, 600.0, seed)) for seed in (1, 1, 2))
    assert first == again != other
    times = [arrival.at_s for arrival in first]
    assert times == sorted(times)
    assert times[0] >= 0.0
    assert times[-1] <= 600.0


def test_the_rate_swings_by_its_factor_around_its_mean():
    arrivals = np.array([a.at_s for a in generated_arrivals(AZURE, 20.0, 7200.0, 0, swing=35.0)])
    assert arrivals.size == pytest.approx(20.0 * 7200, rel=0.1)
    rates = np.histogram(arrivals, 72, (0.0, 7200.0))[0] / 100.0
    assert rates[34:38].mean() / rates[[0, 1, -2, -1]].mean() == pytest.approx(35.0, rel=0.5)
    flat = np.array([a.at_s for a in generated_arrivals(AZURE, 20.0, 7200.0, 0, swing=1.0)])
    calm = np.histogram(flat, 720, (0.0, 7200.0))[0]
    # Poisson with a gamma rate: variance is mean + (0.5 mean)^2.
    assert calm.var() == pytest.approx(200.0 + 100.0**2, rel=0.25)


def test_lengths_are_log_normal_and_within_limits():
    drawn = list(itertools.islice(AZURE.draw(np.random.default_rng(0), 4096, 512), 20_000))
    prompts, outputs = np.array(drawn).T
    assert np.median(prompts) == pytest.approx(1020, rel=0.03)
    assert np.median(outputs) == pytest.approx(129, rel=0.05)
    assert prompts.mean() == pytest.approx(AZURE.prompt_mean, rel=0.03)
    assert (prompts.min(), outputs.min()) >= (1, 1)
    assert outputs.max() == 512


def read(tmp_path, text):
    (tmp_path / "trace.csv").write_text(text)
    return [(a.at_s, a.prompt_len, a.output_len) for a in read_arrivals(tmp_path / "trace.csv", 1000, 100)]


def test_times_count_from_the_first_row_and_long_requests_are_cut(tmp_path):
    """Requests without output are left out."""
    text = "at_s,prompt_len,output_len\n10,5,7\n12.5,2000,300\n13,4,0\n"
    assert read(tmp_path, text) == [(0.0, 5, 7), (2.5, 1000, 100)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("at_s,prompt_len\n1,2\n", "no column num_output_tokens or output_len"),
        ("at_s,output_len\n1,2\n", "no column num_input_tokens or prompt_len"),
        ("at_s,prompt_len,output_len\n5,2,3\n4,2,3\n", "line 3 is earlier than the one before; sort the file"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_a_sentence(tmp_path, text, words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)
