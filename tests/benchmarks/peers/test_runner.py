"""The order of rounds and the check of tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import contestant as contestants
from benchmarks.peers import runner
from benchmarks.peers.contestant import Contestant
from benchmarks.peers.options import BenchOptions
from benchmarks.peers.report import FASER, BenchReport
from tests.support.checkpoints import make_pair

Tokens = Callable[[str, int], int]  # setting and batch size -> the token that every output repeats
Log = list[tuple[str, str, int]]


class FakeContestant(Contestant):
    """Answers without a process."""

    def __init__(self, name: str, log: Log, tokens: Tokens = lambda setting, size: 7) -> None:
        self.name = name
        self.versions = {name: "1.0"}
        self.has_steps = name not in ("transformers", "openvino")
        self._log = log
        self._tokens = tokens

    def run(
        self, setting: str, batch_size: int, prompts: tuple[tuple[int, ...], ...], max_tokens: int
    ) -> dict[str, Any]:
        self._log.append((self.name, setting, batch_size))
        return {
            "seconds": [0.5] * (len(prompts) // batch_size),
            "token_ids": [[self._tokens(setting, batch_size)] * max_tokens for _ in prompts],
            "num_target_passes": len(prompts) * max_tokens,
            "num_draft_tokens": 0,
            "num_accepted_tokens": 0,
            "times_ms": {"draft_ms": 100.0} if self.name == FASER else {},
        }

    def steps_ms(self, num_rows: tuple[int, ...], num_repeats: int) -> dict[int, float]:
        return {rows: float(rows) for rows in num_rows}

    def close(self) -> None:
        pass


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchOptions:
    monkeypatch.setattr(runner, "write_plot", lambda report, path: True)
    target, draft = make_pair(tmp_path / "pair")
    return BenchOptions(
        checkpoint_dir=target,
        draft_checkpoint_dir=draft,
        output_dir=tmp_path / "out",
        expand=(1,),
        batch_sizes=(1, 2),
        speculation=("off", "fixed:2"),
        prompt_len=8,
        max_tokens=4,
        num_prompts=2,
        rounds=3,
        assisted_draft_lens=(3,),
        llamacpp_dtypes=("bf16",),
        step_rows=(1, 4),
    )


def install(monkeypatch: pytest.MonkeyPatch, **openers: Callable[..., Contestant]) -> None:
    for name in ("open_faser", "open_transformers", "open_llamacpp", "open_openvino"):
        monkeypatch.setattr(contestants, name, openers[name])


def peers(log: Log) -> dict[str, Callable[..., Contestant]]:
    return {
        "open_faser": lambda workplace: FakeContestant(FASER, log),
        "open_transformers": lambda workplace: FakeContestant("transformers", log),
        "open_llamacpp": lambda workplace, dtype, extra: FakeContestant(f"llama.cpp {dtype}", log),
        "open_openvino": lambda workplace: FakeContestant("openvino", log),
    }


def settings(report: BenchReport, system: str) -> set[tuple[str, int]]:
    return {(case.setting, case.batch_size) for case in report.cases if case.system == system}


def test_rounds_are_interleaved_and_warm_up_is_dropped(options: BenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    log: Log = []
    install(monkeypatch, **peers(log))
    report = runner.run_bench(options)
    assert settings(report, FASER) == {("off", 1), ("fixed:2", 1), ("off", 2), ("fixed:2", 2)}
    assert settings(report, "transformers") == {("generate", 1), ("assisted:3", 1), ("generate", 2)}
    assert settings(report, "llama.cpp bf16") == {("generate", 1), ("generate", 2)}
    assert settings(report, "openvino") == {("generate", 1), ("assisted:3", 1), ("generate", 2)}
    runs = log[1:]  # the first is llama.cpp's trial
    warm_up, *rounds = (runs[i : i + 12] for i in range(0, len(runs), 12))
    assert len(rounds) == options.rounds
    assert len(set(warm_up)) == 12
    assert rounds[0] == warm_up == list(reversed(rounds[1])) == rounds[2]
    case = report.cases[0]
    assert len(case.tokens_per_s) == options.rounds
    assert case.tokens_per_s[0] == 8.0  # two prompts of 4 tokens, 0.5 s each
    assert case.times_ms["draft_ms"] == 300.0
    assert {(s.system, s.num_rows) for s in report.steps} == {
        (system, rows) for system in (FASER, "llama.cpp bf16") for rows in (1, 4)
    }
    assert report.is_exact
    assert not report.absences
    assert {path.name for path in options.output_dir.iterdir()} >= {"bench.json", "bench.md"}


def test_one_other_token_is_found(options: BenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(setting: str, batch_size: int) -> int:
        return 8 if (setting, batch_size) == ("fixed:2", 2) else 7

    log: Log = []
    openers = peers(log) | {"open_faser": lambda workplace: FakeContestant(FASER, log, tokens)}
    install(monkeypatch, **openers)
    report = runner.run_bench(options)
    assert not report.is_exact
    assert report.exactness[0].difference == "fixed:2 at batch size 2, prompt 0, token 0"
    assert "NOT IDENTICAL" in (options.output_dir / "bench.md").read_text()
