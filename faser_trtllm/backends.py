"""The backends by name: what builds their engines, what opens them, and what they can.

A new backend is a line here. What a line names is imported when it is asked for, so that a name costs nothing, and so
that this module stands below everything it names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from faser_trtllm.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Backend:
    """builder, opener, draft_opener: functions as "module:name", for pkgutil.resolve_name.

    builder: of (BuildOptions) -> EngineBuilder (builder/backend.py). opener: of (OpenRequest, ExitStack) ->
    OpenedEngines (engine/opening.py). draft_opener: of the same -> Engine, for a draft beside a target that is not
    ours; None: there is none. dtypes: that engines can be built in. note: for the flag's help. on_cpu: engines run on
    the cores of a CoreSet.
    """

    name: str
    builder: str
    opener: str
    dtypes: tuple[str, ...]
    note: str = ""
    draft_opener: str | None = None
    on_cpu: bool = False
    has_integer_weights: bool = False  # quantization int8 and int4, when engines are built
    has_fp8: bool = False  # quantization fp8, when engines are opened
    builds_fp8: bool = False  # quantization FP8, when engines are built
    builds_for_other_gpus: bool = False  # compute_capabilities of GPUs that are not there
    has_fp8_kv: bool = False  # KV caches in fp8, when engines are opened
    has_ranks: bool = False  # a target that is split over several GPUs
    has_branches: bool = False  # token trees
    has_vocabulary_maps: bool = False  # a draft model with another tokenizer than its target's
    can_interpret: bool = False  # its networks run on the CPU too, from the checkpoints


BACKENDS = (
    Backend(
        "cpu",
        builder="faser_trtllm.builder.cpu_engine:open_builder",
        opener="faser_trtllm.engine.cpu.open:open_engines",
        draft_opener="faser_trtllm.engine.cpu.open:open_draft",
        dtypes=("bfloat16",),
        on_cpu=True,
        has_integer_weights=True,
        has_branches=True,
        has_vocabulary_maps=True,
    ),
    Backend(
        "cuda",
        builder="faser_trtllm.builder.cuda_engine:open_builder",
        opener="faser_trtllm.engine.cuda.open:open_engines",
        draft_opener="faser_trtllm.engine.cuda.open:open_draft",
        dtypes=("bfloat16", "float16"),
        has_fp8=True,
        has_fp8_kv=True,
        has_ranks=True,
        has_branches=True,
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
        can_interpret=True,
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
    """The backend of a name; InvalidArgumentError for one that there is not."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise InvalidArgumentError(f"backend {name} is unknown; use {names_with(lambda backend: True)}")


def names_with(trait: Callable[[Backend], object]) -> str:
    """The backends that have it, for a sentence: "cpu or cuda"."""
    return " or ".join(backend.name for backend in BACKENDS if trait(backend))
