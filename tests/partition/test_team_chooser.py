"""The choice between one thread and a team, on a simulated machine: near the better one, whatever neighbours do."""

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PLUGINS = HERE.parents[1] / "plugins" / "cpu" / "engine"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    program = tmp_path_factory.mktemp("world") / "world"
    compiler = os.environ.get("CXX", "c++")
    source = HERE / "team_chooser_in_a_world.cpp"
    subprocess.run([compiler, "-std=c++17", "-O1", f"-I{PLUGINS}", str(source), "-o", str(program)], check=True)

    def run(num_passes, period, share_held, share_slow=0.0, team=0.5, slower=1.0):
        arguments = [str(x) for x in (num_passes, period, share_held, share_slow, team, slower)]
        return float(subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout)

    return run


def test_free_cores_are_used(world):
    assert world(20_000, 20_000, 0.0) < 1.01


def test_a_core_that_is_never_free_is_left_alone(world):
    assert world(20_000, 20_000, 1.0) < 1.05


@pytest.mark.parametrize("period", [4_000, 40_000])
def test_a_neighbour_that_comes_and_goes_is_followed(world, period):
    assert world(200_000, period, 0.5) < 1.05


def test_slow_passes_by_chance_do_not_give_the_team_up(world):
    assert world(20_000, 20_000, 0.0, share_slow=0.03) < 1.01


@pytest.mark.parametrize("team", [0.5, 0.75])
def test_a_machine_whose_speed_changes_keeps_the_team(world, team):
    assert world(20_000, 20_000, 0.0, team=team, slower=1.5) < 1.01


@pytest.mark.parametrize("team", [0.5, 0.75])
def test_cold_first_passes_decide_nothing(world, team):
    """Of the first passes each choice gets its share, and no more is lost."""
    assert world(100, 100, 0.0, team=team) < 1.08


def test_a_team_that_is_slower_on_free_cores_is_left_alone(world):
    assert world(20_000, 20_000, 0.0, team=1.3, slower=1.5) < 1.05
