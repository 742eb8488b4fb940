"""Our engine, llama.cpp and OpenVINO on the same weights and bits, each in its own process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.bits.models import Model
from benchmarks.peers.bits.options import BitsOptions
from benchmarks.peers.contestant import SETTLE_S
from benchmarks.peers.gguf import write_gguf
from benchmarks.peers.report import FASER, OFF
from benchmarks.peers.worker_process import WorkerError, WorkerProcess
from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.models.weights import CheckpointWeights

LLAMA = {"bf16": ("bf16",), "int8": ("q8_0",), "int4": ("q4_0", "q4_k_m")}
KEPT = " with activations as they are"  # OpenVINO rounds them to 8 bits by default, as llama.cpp always does
OWN_QUANTIZER = ("q4_0", "q4_k_m")  # written by llama.cpp from the bf16 file


@dataclass(frozen=True)
class Loaded:
    """A system that has loaded its weights. bits_per_weight: of its file."""

    name: str
    versions: dict[str, str]
    bits_per_weight: float
    run: Callable[[list[list[int]], int], dict[str, Any]]  # (prompts, max_tokens) -> the worker's reply
    memory_bytes: Callable[[], int]  # of its process, including mapped files
    close: Callable[[], None]


@dataclass(frozen=True)
class Place:
    """A system's options and folders. work_dir: an existing folder, removed afterwards. kept: a folder to keep weights.

    If kept is None, they go into work_dir.
    """

    options: BitsOptions
    model: Model
    bits: str
    work_dir: Path
    kept: Path | None = None

    @property
    def files_dir(self) -> Path:
        return self.kept or self.work_dir


Opener = Callable[[Place], Loaded]


def openers(options: BitsOptions, bits: str) -> dict[str, Opener]:
    """Return openers by the system's name, ours first."""
    found: dict[str, Opener] = {FASER: open_faser}
    if "llama.cpp" in options.peers:
        found |= {f"llama.cpp {kind}": lambda place, kind=kind: open_llamacpp(place, kind) for kind in LLAMA[bits]}  # type: ignore[misc]
    if "openvino" in options.peers:
        found[f"OpenVINO {bits}"] = open_openvino
        if bits != "bf16":
            found[f"OpenVINO {bits}{KEPT}"] = lambda place: open_openvino(place, keeps_activations=True)
    return found


def open_faser(place: Place) -> Loaded:
    options = place.options
    engine_dir = place.files_dir / "engines"
    build_engines(
        BuildOptions(
            checkpoint_dir=place.model.checkpoint_dir,
            draft_checkpoint_dir=None,
            output_dir=engine_dir,
            max_batch_size=max(options.rows),
            max_num_tokens=options.max_rows,
            max_seq_len=options.max_seq_len,
            quantization=_scheme(place.bits, options.activation_bits),
            quantize_lm_head=place.bits != "bf16",
        )
    )
    file = engine_dir / "target" / "rank0.engine"
    return _loaded(place, FASER, "faser", OFF, None, file, engine_dir=str(engine_dir))


def _scheme(bits: str, activation_bits: int) -> str:
    """Return the spelling of `faser build --quantization`."""
    if bits == "bf16":
        return "none"
    return bits if activation_bits == 16 else {"int8": "W8A8", "int4": "W4A8"}[bits]


def open_llamacpp(place: Place, kind: str) -> Loaded:
    path = place.files_dir / ("model.bf16.gguf" if kind in OWN_QUANTIZER else f"model.{kind}.gguf")
    if not path.exists():
        with CheckpointWeights(place.model.checkpoint_dir) as weights:
            write_gguf(path, place.model.config(), weights, "bf16" if kind in OWN_QUANTIZER else kind)
    file = path.with_name(f"model.{kind}.gguf")
    own = {"quantize": kind} if kind in OWN_QUANTIZER else {}
    python = place.options.llama_python
    arguments = {"gguf": str(path), "use_extra_bufts": True, **own}
    return _loaded(place, f"llama.cpp {kind}", "llamacpp", "generate", python, file, **arguments)


def open_openvino(place: Place, keeps_activations: bool = False) -> Loaded:
    name = f"OpenVINO {place.bits}{KEPT if keeps_activations else ''}"
    folder = _worker_folder(place, name)
    file = folder / f"target-{place.bits}" / "openvino_model.bin"
    arguments = {
        "checkpoint_dir": str(place.model.checkpoint_dir.resolve()),
        "kind": place.bits,
        "keeps_activations": keeps_activations,
    }
    return _loaded(place, name, "openvino", "generate", place.options.openvino_python, file, **arguments)


def _worker_folder(place: Place, name: str) -> Path:
    return place.work_dir / f"worker {name}"


def _loaded(
    place: Place, name: str, module: str, setting: str, python: Path | None, file: Path, **arguments: Any
) -> Loaded:
    options = place.options
    folder = _worker_folder(place, name)
    folder.mkdir()
    process = WorkerProcess(module, folder, python, options.threads(), options.timeout_s)
    common = {"cores": options.pinned_cores(), "num_threads": options.threads()}
    common |= {"max_seq_len": options.max_seq_len, "max_rows": options.max_rows}
    try:
        versions = process.call("load", **common, **arguments)["versions"]
    except WorkerError:
        process.close()
        raise

    def run(prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        time.sleep(SETTLE_S)
        return process.call("run", setting=setting, batch_size=len(prompts), prompts=prompts, max_tokens=max_tokens)

    bits_per_weight = 8 * file.stat().st_size / place.model.num_weights()
    return Loaded(name, versions, bits_per_weight, run, process.memory_bytes, process.close)
