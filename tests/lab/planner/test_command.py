"""`faser plan` as it is typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from faser_trtllm.core.cost_table import CostTable

ROOT = Path(__file__).parents[3]
ASK = "--gpu h100 --target llama-3.1-8b --draft llama-3.2-1b --acceptance 0.7 --load 2 --requests 64,16 --systems price"


def faser_plan(*flags):
    command = [sys.executable, "-m", "faser_trtllm.cli", "plan", *ASK.split(), "--max_requests", "8", *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)


def test_it_prints_json_and_writes_a_report_and_a_table(tmp_path):
    done = faser_plan("--json", "--report", str(tmp_path / "a.html"), "--save_table", str(tmp_path / "t.json"))
    assert done.returncode == 0, done.stderr
    assert [run["system"] for run in json.loads(done.stdout)["runs"]] == ["off", "price"]
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    table = CostTable.from_json(json.loads((tmp_path / "t.json").read_text()))
    assert (table.source, table.num_segments) == ("modeled", 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--gpu", "h20"), "gpu is 'h20'"),
        (("--target", "llama-3.3-70b"), "take --num_gpus 4"),
        (("--quantization", "int4"), "quantization is 'int4'"),
        (("--quantization", "fp8", "--target", "qwen3-30b-a3b"), "qwen3-30b-a3b has a mixture of experts"),
        (("--expert_overlap", "0.3"), "llama-3.1-8b has no experts"),
        (("--report", "/nowhere/a.html"), "has no folder to go to"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence_and_exit_code_2(flags, words):
    done = faser_plan(*flags)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
