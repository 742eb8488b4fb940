"""A mixture of experts through the commands: built from a folder and from a GGUF file, checked, and generated with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.cli import main
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.checkpoint.open import open_checkpoint
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.tokenizer import Tokenizer
from tests.support.executor_harness import Collector
from tests.support.moe_checkpoints import make_moe_pair
from tests.support.published_mixtures import write_mixture

PROMPT, NUM_TOKENS = "and then the other dog", 24
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(3, 60)), [9]]
Run = Callable[..., str]


@pytest.fixture
def faser(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr("faser_trtllm.profiling.profile.QUICK_BUDGET_S", 0.05)

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["faser", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        assert not caught.value.code, err
        return out

    return run


def build(faser: Run, target: Path, draft: Path, output: Path, *more: object) -> Path:
    sizes = ("--max_batch_size", 3, "--max_num_tokens", 64, "--max_seq_len", 128, "--exit_layers", 1)
    faser("build", "--checkpoint_dir", target, "--draft_checkpoint_dir", draft, "--output_dir", output, *sizes, *more)
    return output


def tokens(engine_dir: Path, speculation: str) -> dict[str, list[int]]:
    collector = Collector()
    with open_executor(engine_dir, ExecutorConfig(num_threads=1, speculation=speculation)) as executor:
        for index, prompt in enumerate(PROMPTS):
            executor.submit(str(index), prompt, SamplingParams(max_tokens=40), collector.sink(str(index)))
        while executor.step():
            executor.check_integrity()
        return collector.tokens


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_a_mixture_is_built_checked_and_generates(tmp_path: Path, faser: Run, family: str) -> None:
    target, draft = make_moe_pair(tmp_path, family, num_layers=2)
    engine_dir = build(faser, target, draft, tmp_path / "engine")
    assert faser("check", "--engine_dir", engine_dir).startswith("ok: every file has the size and hash")

    def generate(*more: object) -> Any:
        ask = ("--engine_dir", engine_dir, "--prompt", PROMPT, "--max_tokens", NUM_TOKENS, "--temperature", 0)
        return json.loads(faser("generate", *ask, "--json", *more))

    alone = generate("--speculation", "off")["token_ids"]
    assert len(alone) > NUM_TOKENS // 2
    drafted = generate("--speculation", "fixed:4")
    assert drafted["token_ids"] == generate("--speculation", "price")["token_ids"] == alone
    assert drafted["num_draft_tokens"] > 0
    prompt = Tokenizer.load(target).encode(PROMPT)
    with ExitStack() as stack:
        checkpoint = open_checkpoint(target, stack)
        reference = ReferenceModel(checkpoint.config, checkpoint.weights, round_to_bf16=True)
    best = reference.logits([*prompt, *alone[:-1]]).argmax(-1)[len(prompt) - 1 :].tolist()
    assert sum(map(int.__eq__, best, alone)) >= len(alone) - 3, "rounding decides between near equals only"
    guided = generate("--speculation", "fixed:4", "--guided_regex", "(yes|no|perhaps)")
    assert guided["text"].strip() in ("yes", "no", "perhaps")


@pytest.mark.parametrize("quantization", ["none", "int8", "W4A8:32"])
def test_a_gguf_file_gives_the_tokens_of_its_folder(tmp_path: Path, faser: Run, quantization: str) -> None:
    target, draft = make_moe_pair(tmp_path, num_layers=2)
    file = write_mixture(tmp_path / "target.gguf", target, "qwen3")
    options = ("--quantization", quantization)
    folder = build(faser, target, draft, tmp_path / "folder", *options)
    from_file = build(faser, file, draft, tmp_path / "file", *options)
    plain = tokens(folder, "off")
    assert tokens(from_file, "off") == tokens(from_file, "fixed:3") == plain
    assert [len(text) for text in plain.values()] == [40] * 3


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_mxfp4_experts_are_not_reported_as_rounded(tmp_path: Path, backend: str) -> None:
    """bf16 holds their values."""
    target, notes = make_moe_pair(tmp_path, "gpt_oss", num_layers=2, head_dim=64)[0], []
    build_engines(BuildOptions(target, None, tmp_path / "engine", backend=backend, dry_run=True), note=notes.append)
    assert not any("MXFP4" in note for note in notes)


def test_sinks_are_refused_for_heads_that_no_kernel_has(tmp_path: Path) -> None:
    target = make_moe_pair(tmp_path, "gpt_oss", num_layers=2, head_dim=128)[0]
    message = "head_dim is 128 in the target checkpoint, whose attention has sinks; the CUDA kernels have sinks for 64"
    with pytest.raises(InvalidArgumentError, match=message):
        build_engines(BuildOptions(target, None, tmp_path / "engine", backend="cuda"))
