"""The demo as a user runs it, and what it prints."""

import os
import subprocess
import sys
import threading

import pytest

from examples.demo import GREEN, RESET, Run, Screen, describe_choice, report, wants_color
from faser_trtllm.errors import FaserError
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.client import Response
from tests.support.checkpoints import write_tokenizer
from tests.support.effort import pick
from tests.support.triton_server import ROOT, run_dir

# The demo with a target of a quarter of the work, and one round of its comparison.
SHORT_DEMO = """
import sys
from examples import demo
demo.EXPAND = 4
demo.MIN_ROUNDS = demo.MAX_ROUNDS = 1
sys.exit(demo.main())
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 320)
    return Tokenizer.load(directory)


def responses_of(tokenizer, texts_and_drafts):
    for text, is_draft in texts_and_drafts:
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        yield Response(text, ids, is_draft=(is_draft,) * len(ids))
    yield Response("", (), "length", num_output_tokens=4, num_draft_tokens=3, num_accepted_tokens=2)


def test_accepted_drafts_are_green_on_a_terminal(tokenizer, capsys):
    Screen(tokenizer, colored=True).show("title", "prompt ", responses_of(tokenizer, [("one", False), ("two", True)]))
    said = capsys.readouterr().out
    assert f"{GREEN}green: drafted and accepted{RESET}" in said
    answer = said.partition("prompt ")[2].splitlines()[0]
    green = "".join(piece.partition(RESET)[0] for piece in answer.split(GREEN)[1:])
    assert green == "two"
    assert answer.replace(GREEN, "").replace(RESET, "") == "onetwo"
    assert "67% of 3 draft tokens accepted" in said


def test_nothing_is_colored_elsewhere(tokenizer, capsys):
    Screen(tokenizer, colored=False).show("title", "prompt ", responses_of(tokenizer, [("one", False), ("two", True)]))
    said = capsys.readouterr().out
    assert "prompt onetwo\n" in said
    assert "\033" not in said


@pytest.mark.parametrize(
    ("is_terminal", "environment", "colored"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": ""}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
    ],
)
def test_colors_are_for_terminals_that_want_them(monkeypatch, is_terminal, environment, colored):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert wants_color() is colored


def side(seconds, tokens=((1, 2, 3, 4),), num_drafts=0):
    return [Run(s, tokens, num_drafts, num_drafts // 2) for s in seconds]


def test_ratios_are_of_the_same_round():
    """The machine was four times slower in the second round, for all of them."""
    lines = list(report({"off": side((1.0, 4.0, 1.0)), "price": side((0.5, 2.0, 0.5), num_drafts=10)}))
    assert any(line.startswith("price") and "2.00x" in line and "50% of 30 draft" in line for line in lines)
    assert any(line.startswith("off") and "1.00x" in line and "nothing drafted" in line for line in lines)
    assert lines[-1] == "the tokens are the same with and without speculation"


def test_other_tokens_are_an_error():
    with pytest.raises(FaserError, match="changed the tokens"):
        list(report({"off": side((1.0,)), "price": side((1.0,), tokens=((1, 2, 3, 5),))}))


def test_the_choice_is_told_with_its_costs():
    line = describe_choice([0.25, 0.7, 0.001, 0.049], 1.8, 5.0, {1: 6.0, 4: 15.0})
    assert "none in 25%, 1 in 70%, 3 in 5%; steps with drafts brought 1.8 tokens" in line
    assert "5.0 ms without drafts, 1.2 times that with 1 and 3.0 times that with 4" in line
    assert "none in 100%; by the cost table" in describe_choice([], None, 5.0, {1: 6.0})


@pytest.mark.triton
@pytest.mark.slow
def test_the_demo_streams_compares_and_cleans_up():
    command = [sys.executable, *pick(["-c", SHORT_DEMO], ["examples/demo.py"]), "--max_tokens", "16"]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env
    ) as demo:
        killer = threading.Timer(240, demo.kill)
        killer.start()
        lines = iter(demo.stdout.readline, "")
        said = ""
        for line in lines:
            said += line
            if line.startswith("Triton is ready"):
                break
        else:
            pytest.fail(said)
        directory = run_dir(demo.pid)
        assert directory.exists()
        said += "".join(lines)
    killer.cancel()
    assert demo.returncode == 0, said
    assert said.count("[16 tokens in") == 2
    for name in ("off", "fixed:4", "price"):
        assert any(line.startswith(f"{name} ") and "x   " in line for line in said.splitlines()), name
    assert "price chose its drafts per step: " in said
    assert "the tokens are the same with and without speculation" in said
    assert "no process, port or temporary file is left; kept are engines/built/demo-x" in said
    assert not directory.exists()
