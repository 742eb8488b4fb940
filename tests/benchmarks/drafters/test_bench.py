"""The whole drafter bench on a tiny pair, and its workloads; no time is asserted."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks.drafters.runner import DrafterBenchOptions, run_drafter_bench
from benchmarks.drafters.workload import edits
from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.models.tokenizer import Tokenizer
from tests.support.checkpoints import make_pair

SYSTEMS = ("off", "fixed:4/suffix", "fixed:4/suffix+model")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target, draft = make_pair(root / "checkpoints", num_layers=2)
    for directory in (target, draft):  # a prompt and an edited function, in bytes
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return build_engines(BuildOptions(target, draft, root / "engines", max_seq_len=1024, max_batch_size=1)).path


def test_every_system_says_the_same_and_is_counted(pair, tmp_path):
    lines = []
    options = DrafterBenchOptions(pair, tmp_path, SYSTEMS, num_jobs=2, num_tokens=12, num_rounds=1, num_threads=1)
    report = run_drafter_bench(options, lines.append)
    assert json.loads((tmp_path / "drafters.json").read_text()) == report
    assert lines == ["round 1 of 1"]
    for systems in report["results"].values():
        assert list(systems) == list(SYSTEMS)
        assert len({counts["tokens"] for counts in systems.values()}) == 1
        assert systems["off"]["rows"] == systems["off"]["passes"]
        assert systems["fixed:4/suffix"]["draft_steps"] == 0
    replayed = report["results"]["edits, replayed"]
    assert replayed["fixed:4/suffix"]["passes"] < 0.6 * replayed["off"]["passes"]
    assert replayed["fixed:4/suffix"]["passed"]["suffix"] > 0
    if find_spec("matplotlib"):
        assert (tmp_path / "drafters.png").read_bytes().startswith(b"\x89PNG")
    assert "| edits, replayed | off |" in (tmp_path / "drafters.md").read_text()


def test_an_edit_repeats_most_of_what_it_edits(pair):
    jobs = edits(Tokenizer.load(pair), 3)
    assert len(jobs) == 3
    for job in jobs:
        assert len(job.replay) == job.num_tokens >= 60
        prompt = np.lib.stride_tricks.sliding_window_view(np.array(job.prompt), 4)
        answer = np.lib.stride_tricks.sliding_window_view(np.array(job.replay), 4)
        known = (answer[:, None] == prompt[None]).all(2).any(1)
        assert 0.4 < known.mean() < 1.0
