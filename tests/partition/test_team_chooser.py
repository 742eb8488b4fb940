"""The choice between one thread and a team, on a simulated machine: near the better one, whatever neighbors do."""

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PLUGINS = HERE.parents[1] / "plugins" / "cpu" / "engine"


def compiled(name, directory):
    """Return what the program prints, given its arguments."""
    program = directory / name
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", f"-I{PLUGINS}", str(HERE / f"{name}.cpp")]
    subprocess.run([*command, "-o", str(program)], check=True)

    def run(*arguments):
        command = [str(program), *map(str, arguments)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return run


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    program = compiled("team_chooser_in_a_world", tmp_path_factory.mktemp("world"))

    def run(num_passes, period, share_held, share_slow=0.0, team=0.5, slower=1.0):
        return float(program(num_passes, period, share_held, share_slow, team, slower))

    return run


def test_a_size_begins_with_the_team_where_a_smaller_one_found_it_faster(tmp_path):
    first_passes = compiled("team_chooser_of_sizes", tmp_path)
    assert first_passes(1.0, 0.6) == "11111111"
    assert first_passes(1.0, 1.5) == "11001100", "else both are tried, as for a first size"


def test_free_cores_are_used(world):
    assert world(20_000, 20_000, 0.0) < 1.01


def test_a_core_that_is_never_free_is_left_alone(world):
    assert world(20_000, 20_000, 1.0) < 1.05


@pytest.mark.parametrize("period", [4_000, 40_000])
def test_a_neighbor_that_comes_and_goes_is_followed(world, period):
    assert world(200_000, period, 0.5) < 1.05


def test_slow_passes_by_chance_do_not_give_the_team_up(world):
    assert world(20_000, 20_000, 0.0, share_slow=0.03) < 1.01


@pytest.mark.parametrize("team", [0.5, 0.75])
def test_a_machine_whose_speed_changes_keeps_the_team(world, team):
    assert world(20_000, 20_000, 0.0, team=team, slower=1.5) < 1.01


@pytest.mark.parametrize("team", [0.5, 0.75])
def test_cold_first_passes_decide_nothing(world, team):
    """Each choice gets its share of the first passes, and no more is lost."""
    assert world(100, 100, 0.0, team=team) < 1.08


def test_a_team_that_is_slower_on_free_cores_is_left_alone(world):
    assert world(20_000, 20_000, 0.0, team=1.3, slower=1.5) < 1.05
