"""Describes a TensorRT engine directory and what it needs to run. Requires neither a GPU nor TensorRT."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from faser_trtllm.builder.cuda_engine_file import CudaFile
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.builder.network.options import NetworkOptions, TensorSpec
from faser_trtllm.builder.plan_file import SEGMENT, PlanFile, PlanInfo, describe

_NUMBERED = re.compile(r"(.*_)(\d+)")


def engine_report(engines: EngineDir) -> Iterator[str]:
    """Yield the lines of the report; raise EngineFileError if a file is not a valid engine file."""
    yield from _requirements(engines)
    yield from _plan_file("target", engines.target_path)
    if engines.draft_head is not None:
        yield cuda_file_line("draft", engines.draft_path)
        yield "note: a draft head needs a CUDA build of torch, and nvcc to compile its kernels, whatever its target is"
    elif engines.has_draft:
        yield from _plan_file("draft", engines.draft_path)


def cuda_file_line(role: str, path: Path) -> str:
    """Describe an engine file of the cuda backend in one line; raise like CudaFile.open."""
    with CudaFile.open(path) as file:
        layers = " ".join(f"{first}-{last}" for first, last in itertools.pairwise(file.segments))
        size = path.stat().st_size >> 20
        return f"{role}: {file.dtype}, {size} MiB, {file.model['num_layers']} layers in segments {layers}"


def _requirements(engines: EngineDir) -> Iterator[str]:
    with PlanFile.open(engines.target_path) as file:
        needs = file.requirements
    newer = " or newer" if needs.portable else ""
    gpus = f"an NVIDIA GPU of compute capability {', '.join(needs.compute_capabilities)}{newer}"
    limits = engines.build_config
    yield f"needs: {gpus}, {needs.backend} {needs.tensorrt_version}"
    yield (
        f"limits: {limits.max_batch_size} requests, {limits.max_num_tokens} rows in a pass, "
        f"{limits.max_seq_len} tokens in a request, {limits.max_draft_len} drafts, "
        f"KV blocks of {limits.tokens_per_block} tokens"
    )
    per_token = engines.kv_bytes_per_token()
    whole = per_token * limits.max_batch_size * limits.max_seq_len
    yield f"KV cache: {_size(per_token)} per token, {_size(whole)} for all requests at full length"


def _plan_file(role: str, path: Path) -> Iterator[str]:
    with PlanFile.open(path) as file:
        plans = file.plans
        total = sum(plan.nbytes for plan in plans)
        yield f"{role}: {file.network.dtype}, {len(file.segments)} segment(s), {_size(total)}"
        for plan in plans:
            info = plan.info
            kind = f"{info.flavour} attention, " if info.kind == SEGMENT else ""
            plugins = f"plugins {', '.join(info.plugins)}" if info.plugins else "no plugins"
            yield f"  {describe(info)}: {_size(plan.nbytes)}, {kind}{plugins}, network {info.specification[:12]}"
            yield f"    in: {_tensors(info.inputs)}"
            yield f"    out: {_tensors(info.outputs)}"
        yield from _profiles(file.network, [plan.info for plan in plans])


def _profiles(network: NetworkOptions, infos: Sequence[PlanInfo]) -> Iterator[str]:
    used = {size for info in infos for spec in info.inputs for size in spec.shape if isinstance(size, str)}
    for index, max_rows in enumerate((*network.profile_rows, network.max_num_tokens)):
        ranges = network.dimension_ranges(max_rows)
        text = ", ".join(
            f"{name} {low} to {high} (best at {best})" for name, (low, best, high) in ranges.items() if name in used
        )
        yield f"  profile {index}: {text}"


def _tensors(specs: Sequence[TensorSpec]) -> str:
    """Describe tensors; list tensors that differ only in their layer number as one."""
    groups: dict[tuple[str, str, tuple[int | str, ...]], list[int]] = {}
    for spec in specs:
        match = _NUMBERED.fullmatch(spec.name)
        stem, number = (match[1], int(match[2])) if match else (spec.name, -1)
        groups.setdefault((stem, spec.dtype, spec.shape), []).append(number)
    words = []
    for (stem, dtype, shape), layers in groups.items():
        name = stem
        if layers != [-1]:
            name += str(layers[0]) if len(layers) == 1 else f"{{{layers[0]}..{layers[-1]}}}"
        words.append(f"{name} {dtype} [{', '.join(map(str, shape))}]")
    return ", ".join(words)


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"
