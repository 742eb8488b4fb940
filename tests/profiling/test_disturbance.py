"""Tests that one sentence says whether other work disturbed a measurement, and that the table keeps it."""

import json
import threading

import pytest

from faser_trtllm.core.cost_table import CostSample, CostTable, Fingerprint
from faser_trtllm.profiling import disturbance
from faser_trtllm.profiling.disturbance import Disturbance, describe, spread

SAMPLES = [CostSample("verify", rows, 1, 64, float(rows)) for rows in (1, 2)]


def test_a_quiet_machine_is_not_warned_about() -> None:
    assert describe(0.02, 0.05) == ""


@pytest.mark.parametrize(("waiting", "repeats", "words"), [(0.4, 0.0, "40 % of the time"), (0.0, 0.6, "60 % longer")])
def test_each_sign_alone_is_told_with_what_to_do(waiting: float, repeats: float, words: str) -> None:
    sentence = describe(waiting, repeats)
    assert words in sentence
    assert "faser profile" in sentence
    assert "\n" not in sentence


def test_the_spread_is_of_the_pass_in_the_middle() -> None:
    steady, shaken = [1.0, 1.0, 1.01], [1.0, 3.0, 3.0]
    assert spread([steady, steady, shaken]) == 0.0
    assert spread([steady, shaken, shaken]) == 2.0
    assert spread([[1.0, 9.0]]) == 0.0, "two runs say nothing, the first of which may have been cold"


def test_waiting_for_a_core_is_what_the_kernel_says(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(waited_s: float) -> None:
        for thread in ("1", "2"):
            (tmp_path / thread).mkdir(exist_ok=True)
            (tmp_path / thread / "schedstat").write_text(f"5 {int(1e9 * waited_s)} 7\n")

    monkeypatch.setattr(disturbance, "TASKS", tmp_path)
    write(1.0)
    quiet = Disturbance(2)
    assert quiet.warning([]) == ""
    write(1e6)  # much longer than this test takes
    assert "waited for a core" in quiet.warning([])
    (tmp_path / "1" / "schedstat").write_text("?")
    (tmp_path / "2" / "schedstat").unlink()
    assert Disturbance(2).warning([]) == "", "a kernel that does not tell disturbs nothing"


def test_threads_that_end_meanwhile_are_no_error() -> None:
    watched = Disturbance(1)
    for _ in range(20):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        watched.warning([])
        thread.join()


def test_a_table_keeps_the_sentence() -> None:
    table = CostTable.fit(SAMPLES, Fingerprint("cpu", "isa", 1, "engine"), warning=describe(0.5, 0.0))
    data = json.loads(json.dumps(table.to_json()))
    assert CostTable.from_json(data).warning == table.warning != ""
    del data["warning"]
    assert CostTable.from_json(data).warning == "", "a table from before this field"
