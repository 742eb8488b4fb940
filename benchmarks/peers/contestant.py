"""The systems under test, each in its own process, with their files, start-up and settings."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoint import write_checkpoint
from benchmarks.peers.gguf import write_gguf
from benchmarks.peers.options import BenchOptions
from benchmarks.peers.report import FASER, OFF
from benchmarks.peers.worker_process import WorkerError, WorkerProcess
from benchmarks.peers.workers.protocol import CONTEXT_LEN
from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.errors import install
from faser_trtllm.models.config import ModelConfig, load_model_config
from faser_trtllm.models.expand import ExpandedWeights, expand_config
from faser_trtllm.models.weights import CheckpointWeights

SETTLE_S = 0.03  # lets thread pools of the previous process stop spinning
LLAMACPP_FIX = f"{install('bench-llamacpp')}, or give its interpreter with --llama_python"
TRANSFORMERS_FIX = f"{install('bench')}, or give its interpreter with --transformers_python"

OPENVINO_FIX = (
    "pip install openvino-genai optimum-intel nncf in an environment of its own, and give its interpreter with "
    "--openvino_python"
)


@dataclass(frozen=True)
class Workplace:
    """One form of the models on disk, and the settings of all systems."""

    options: BenchOptions
    expand: int
    work_dir: Path  # an existing folder, removed with its contents after the form is measured

    @property
    def max_seq_len(self) -> int:
        """A multiple of 64 with room for a bonus token and drafts, and for the one-step measurement."""
        needed = self.options.prompt_len + self.options.max_tokens + 16
        return -(-max(needed, CONTEXT_LEN + 16) // 64) * 64

    @property
    def max_rows(self) -> int:
        return max(max(self.options.batch_sizes) * self.options.prompt_len, *self.options.step_rows, 256)

    def target_config(self) -> ModelConfig:
        return expand_config(load_model_config(self.options.checkpoint_dir), self.expand)

    def folder(self, name: str) -> Path:
        path = self.work_dir / name
        path.mkdir()
        return path


class Contestant:
    """A loaded system. settings(batch_size): the settings it can run."""

    def __init__(self, name: str, process: WorkerProcess, has_steps: bool) -> None:
        self.name = name
        self.versions: dict[str, str] = {}
        self.has_steps = has_steps
        self._process = process

    def load(self, workplace: Workplace, **arguments: Any) -> None:
        options = workplace.options
        common = {"cores": options.pinned_cores(), "num_threads": options.threads()}
        common |= {"max_seq_len": workplace.max_seq_len, "max_rows": workplace.max_rows}
        self.versions = self._process.call("load", **common, **arguments)["versions"]

    def run(
        self, setting: str, batch_size: int, prompts: tuple[tuple[int, ...], ...], max_tokens: int
    ) -> dict[str, Any]:
        time.sleep(SETTLE_S)
        return self._process.call("run", setting=setting, batch_size=batch_size, prompts=prompts, max_tokens=max_tokens)

    def steps_ms(self, num_rows: tuple[int, ...], num_repeats: int) -> dict[int, float]:
        time.sleep(SETTLE_S)
        reply = self._process.call("steps", num_rows=num_rows, num_repeats=num_repeats)
        return {int(rows): ms for rows, ms in reply["steps_ms"].items()}

    def settings(self, options: BenchOptions, batch_size: int) -> tuple[str, ...]:
        if self.name == FASER:
            return options.speculation
        if self.name in ("transformers", "openvino") and batch_size == 1:  # they do not draft for several requests
            return ("generate", *(f"assisted:{k}" for k in options.assisted_draft_lens))
        return ("generate",)

    def close(self) -> None:
        self._process.close()


def open_faser(workplace: Workplace) -> Contestant:
    """Build our engines and start our worker; errors propagate."""
    options = workplace.options
    lengths = [int(setting.partition(":")[2]) for setting in options.speculation if setting != OFF]
    build_engines(
        BuildOptions(
            checkpoint_dir=options.checkpoint_dir,
            draft_checkpoint_dir=options.draft_checkpoint_dir,
            output_dir=workplace.work_dir / "engines",
            max_batch_size=max(options.batch_sizes),
            max_num_tokens=workplace.max_rows,
            max_seq_len=workplace.max_seq_len,
            max_draft_len=max(lengths, default=1),
            expand=workplace.expand,
        )
    )
    return _open(
        workplace,
        FASER,
        "faser",
        None,
        has_steps=True,
        engine_dir=str(workplace.work_dir / "engines"),
    )


def open_transformers(workplace: Workplace) -> Contestant:
    """Start transformers, on a checkpoint of the enlarged form; raise WorkerError if it cannot run."""
    options = workplace.options
    return _open(
        workplace,
        "transformers",
        "hf",
        options.transformers_python,
        has_steps=False,
        checkpoint_dir=str(_checkpoint(workplace)),
        draft_checkpoint_dir=str(options.draft_checkpoint_dir.resolve()),
    )


def open_openvino(workplace: Workplace) -> Contestant:
    """Start OpenVINO, which converts both models with its own tools; raise WorkerError if it cannot run."""
    options = workplace.options
    return _open(
        workplace,
        "openvino",
        "openvino",
        options.openvino_python,
        has_steps=False,
        checkpoint_dir=str(_checkpoint(workplace)),
        draft_checkpoint_dir=str(options.draft_checkpoint_dir.resolve()),
        kind="bf16",
    )


def _checkpoint(workplace: Workplace) -> Path:
    """Write the target in the workplace's form, with its tokenizer."""
    source = workplace.options.checkpoint_dir
    if workplace.expand == 1:
        return source.resolve()
    path = workplace.work_dir / "checkpoint"
    if not path.exists():
        with CheckpointWeights(source) as weights:
            write_checkpoint(path, source, workplace.target_config(), ExpandedWeights(weights, workplace.expand))
        (path / "tokenizer.json").symlink_to((source / "tokenizer.json").resolve())
    return path.resolve()


def open_llamacpp(workplace: Workplace, dtype: str, use_extra_bufts: bool = True) -> Contestant:
    """Write the weights as GGUF and start llama.cpp; raise WorkerError if it cannot run.

    use_extra_bufts: let llama.cpp repack weights for the CPU's matrix units, its default.
    """
    path = workplace.work_dir / f"target.{dtype}.gguf"
    if not path.exists():
        with CheckpointWeights(workplace.options.checkpoint_dir) as weights:
            write_gguf(path, workplace.target_config(), ExpandedWeights(weights, workplace.expand), dtype)
    return _open(
        workplace,
        f"llama.cpp {dtype}",
        "llamacpp",
        workplace.options.llama_python,
        has_steps=True,
        gguf=str(path),
        use_extra_bufts=use_extra_bufts,
    )


def _open(
    workplace: Workplace, name: str, module: str, python: Path | None, *, has_steps: bool, **arguments: Any
) -> Contestant:
    options = workplace.options
    folder = workplace.folder(f"worker-{len(list(workplace.work_dir.iterdir()))}")
    process = WorkerProcess(module, folder, python, options.threads(), options.timeout_s)
    contestant = Contestant(name, process, has_steps)
    try:
        contestant.load(workplace, **arguments)
    except WorkerError:
        contestant.close()
        raise
    return contestant
