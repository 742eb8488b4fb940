"""The table of backends: how each one's engines are built and opened, and what it supports.

Modules are imported only when a backend is used, so unused backends cost nothing and this module imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from faser_trtllm.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend; builder, opener and draft_opener are functions as "module:name", for pkgutil.resolve_name."""

    name: str
    builder: str  # (BuildOptions) -> EngineBuilder (builder/backend.py)
    opener: str  # (OpenRequest, ExitStack) -> OpenedEngines (engine/opening.py)
    dtypes: tuple[str, ...]  # supported when engines are built
    note: str = ""  # for the help text of --backend
    draft_opener: str | None = None  # (OpenRequest, ExitStack) -> Engine, to draft for a target of another runtime
    on_cpu: bool = False  # engines run on the cores of a CoreSet
    has_integer_weights: bool = False  # builds engines with int8 and int4 weights
    has_mxfp4: bool = False  # builds engines with experts in MXFP4
    has_fp8: bool = False  # quantizes to fp8 when an engine is opened
    builds_fp8: bool = False  # builds fp8 engines
    builds_for_other_gpus: bool = False  # builds for compute capabilities of GPUs that are not present
    has_fp8_kv: bool = False  # can keep the KV cache in fp8
    has_ranks: bool = False  # can split a target over several GPUs
    has_branches: bool = False  # token trees
    is_deterministic: bool = False  # always, or with the option: a row's bits do not depend on its batch
    has_vocabulary_maps: bool = False  # a draft model may have another tokenizer than its target


BACKENDS = (
    Backend(
        "cpu",
        builder="faser_trtllm.builder.cpu_engine:open_builder",
        opener="faser_trtllm.engine.cpu.open:open_engines",
        draft_opener="faser_trtllm.engine.cpu.open:open_draft",
        dtypes=("bfloat16",),
        on_cpu=True,
        has_integer_weights=True,
        has_mxfp4=True,
        has_branches=True,
        is_deterministic=True,
        has_vocabulary_maps=True,
    ),
    Backend(
        "cuda",
        builder="faser_trtllm.builder.cuda_engine:open_builder",
        opener="faser_trtllm.engine.cuda.open:open_engines",
        draft_opener="faser_trtllm.engine.cuda.open:open_draft",
        dtypes=("bfloat16", "float16"),
        has_mxfp4=True,
        has_fp8=True,
        has_fp8_kv=True,
        has_ranks=True,
        has_branches=True,
        is_deterministic=True,
        has_vocabulary_maps=True,
    ),
    Backend(
        "tensorrt_rtx",
        builder="faser_trtllm.builder.tensorrt_engine:open_builder",
        opener="faser_trtllm.engine.tensorrt.open:open_engines",
        draft_opener="faser_trtllm.engine.tensorrt.open:open_draft",
        dtypes=("bfloat16", "float16", "float32"),
        note="any machine, for RTX GPUs",
        builds_fp8=True,
        builds_for_other_gpus=True,
    ),
    Backend(
        "tensorrt",
        builder="faser_trtllm.builder.tensorrt_engine:open_builder",
        opener="faser_trtllm.engine.tensorrt.open:open_engines",
        draft_opener="faser_trtllm.engine.tensorrt.open:open_draft",
        dtypes=("bfloat16", "float16", "float32"),
        note="on the GPU that it is for",
        builds_fp8=True,
    ),
)


def find_backend(name: str) -> Backend:
    """Return the backend with this name; raise InvalidArgumentError if there is none."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise InvalidArgumentError(f"backend {name} is unknown; use {names_with(lambda backend: True)}")


def names_with(trait: Callable[[Backend], object]) -> str:
    """Return the names of the backends with this trait, for a sentence: "cpu or cuda"."""
    return " or ".join(backend.name for backend in BACKENDS if trait(backend))
