"""A TensorRT engine's file (rank0.engine): the plans of one model's segments, concatenated.

Layout: a prefix of 64 bytes (b"FASERTRT", uint32 version, uint32 zero, uint64 offset and uint64 length of the table,
sha256 of the table), then plans, each at a multiple of 4096 bytes, then the table, a JSON object: requirements, network
(the NetworkOptions) and plans. Little-endian; offsets count from the start of the file. The prefix is written last, so
a killed build leaves no valid engine file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from pydantic import TypeAdapter, ValidationError

from faser_trtllm.builder.engine_file import TENSORRT_MAGIC, round_up
from faser_trtllm.builder.network.options import NetworkOptions, TensorSpec
from faser_trtllm.core.closing import Closing
from faser_trtllm.errors import EngineFileError, FaserError, reason_of

MAGIC = TENSORRT_MAGIC
VERSION = 1
PLAN_ALIGNMENT = 4096
SEGMENT = "segment"
EARLY_EXIT = "early_exit"
_PREFIX = struct.Struct("<8sIIQQ32s")
_PIECE_BYTES = 16 << 20
_MAX_TABLE_BYTES = 64 << 20
_REMEDY = "rebuild it with faser build"


Range = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The smallest, the expected and the largest shape of an input."""


@dataclass(frozen=True, slots=True)
class PlanInfo:
    """Description of a plan of layers [first, last). kind: SEGMENT or EARLY_EXIT. flavour: "native" or "plugin".

    specification: sha256 of its network's definition; plans of the same network differ from build to build.
    plugins: ids of its plugins. profiles: per profile {input: Range} of the inputs with dynamic shapes.
    """

    kind: str
    first: int
    last: int
    flavour: str
    specification: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    plugins: tuple[str, ...]
    profiles: tuple[Mapping[str, Range], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan and its location in the file."""

    info: PlanInfo
    offset: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Requirements:
    """The software and GPUs that a plan file needs. backend: "tensorrt" or "tensorrt_rtx", of this exact version.

    compute_capabilities: GPUs it was built for, such as "8.6". portable: it also runs on newer GPUs.
    """

    backend: str
    tensorrt_version: str
    compute_capabilities: tuple[str, ...]
    portable: bool


@dataclass(frozen=True, slots=True)
class PlanTable:
    """A file's plans, requirements and limits (network), as stored in the file."""

    requirements: Requirements
    network: NetworkOptions
    plans: tuple[Plan, ...]


class PlanFileWriter:
    """A context manager that writes a plan file, and completes it if its block ends without an error."""

    def __init__(self, path: Path, requirements: Requirements, network: NetworkOptions) -> None:
        self._path = path
        self._requirements = requirements
        self._network = network
        self._plans: list[Plan] = []

    def __enter__(self) -> PlanFileWriter:
        self._file = self._path.open("wb")
        self._file.write(bytes(_PREFIX.size))
        return self

    def add(self, info: PlanInfo, plan: memoryview) -> None:
        """Append a plan's bytes, hashing them in chunks; OSError from the file system."""
        offset = round_up(self._file.tell(), PLAN_ALIGNMENT)
        self._file.seek(offset)
        digest = hashlib.sha256()
        plan = plan.cast("B")
        for start in range(0, plan.nbytes, _PIECE_BYTES):
            piece = plan[start : start + _PIECE_BYTES]
            digest.update(piece)
            self._file.write(piece)
        self._plans.append(Plan(info, offset, plan.nbytes, digest.hexdigest()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file as file:
            if error is not None:
                return
            table = PlanTable(self._requirements, self._network, tuple(self._plans))
            data = json.dumps(asdict(table), separators=(",", ":")).encode()
            offset = file.tell()
            file.write(data)
            file.seek(0)
            file.write(_PREFIX.pack(MAGIC, VERSION, 0, offset, len(data), hashlib.sha256(data).digest()))
            file.flush()
            os.fsync(file.fileno())


class PlanFile(Closing):
    """A plan file mapped read-only; views of plans must be released before close()."""

    def __init__(self, label: str, table: PlanTable, mapping: mmap.mmap) -> None:
        self.label = label
        self.requirements, self.network, self.plans = table.requirements, table.network, table.plans
        self._mapping = mapping

    @classmethod
    def open(cls, path: Path) -> PlanFile:
        """Map the file after checking magic, version, table and the placement of all plans; raises EngineFileError."""
        label = f"{path.parent.name}/{path.name}" if path.parent.name else path.name
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < _PREFIX.size:
                    raise EngineFileError(f"{label}: {size} bytes are too few for an engine file; {_REMEDY}")
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise EngineFileError(f"{label} cannot be read ({reason_of(error)}); {_REMEDY}") from error
        try:
            table = _read_table(mapping, size, label)
        except BaseException:
            mapping.close()
            raise
        return cls(label, table, mapping)

    @property
    def segments(self) -> tuple[Plan, ...]:
        return tuple(plan for plan in self.plans if plan.info.kind == SEGMENT)

    @property
    def early_exit(self) -> Plan | None:
        """The plan that scores candidates between segments; None without exits."""
        return next((plan for plan in self.plans if plan.info.kind == EARLY_EXIT), None)

    def view(self, plan: Plan, verify: bool = True) -> memoryview:
        """Return a view of the plan's bytes; with verify, EngineFileError unless they match the table's sha256."""
        view = memoryview(self._mapping)[plan.offset : plan.offset + plan.nbytes]
        if verify:
            digest = hashlib.sha256(view).hexdigest()
            if digest != plan.sha256:
                view.release()
                raise EngineFileError(
                    f"{self.label}: the plan of {describe(plan.info)} has sha256 {digest[:12]}, the table says "
                    f"{plan.sha256[:12]}; {_REMEDY}"
                )
        return view

    def close(self) -> None:
        """Unmap the file. Idempotent."""
        self._mapping.close()


def describe(info: PlanInfo) -> str:
    return f"layers {info.first} to {info.last - 1}" if info.kind == SEGMENT else "the early exit"


def arch_capability(arch: str) -> str:
    """Return "8.9" for "sm_89", "12.0" for "sm_120"."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return f"{digits[:-1]}.{digits[-1]}"


def _read_table(mapping: mmap.mmap, size: int, label: str) -> PlanTable:
    magic, version, _, offset, length, digest = _PREFIX.unpack(mapping[: _PREFIX.size])
    if magic != MAGIC:
        raise EngineFileError(f"{label} is not a TensorRT engine file of faser; {_REMEDY}")
    if version != VERSION:
        raise EngineFileError(f"{label} has version {version}, this faser reads {VERSION}; {_REMEDY}")
    if length > _MAX_TABLE_BYTES or offset + length != size:
        raise EngineFileError(f"{label}: {size} bytes where {offset + length} were written; {_REMEDY}")
    data = mapping[offset : offset + length]
    if hashlib.sha256(data).digest() != digest:
        raise EngineFileError(f"{label}: the table of plans is damaged; {_REMEDY}")
    try:
        table = _table_type().validate_json(data)
        for plan in table.plans:
            if plan.offset % PLAN_ALIGNMENT or not 0 < plan.offset <= plan.offset + plan.nbytes <= offset:
                raise ValueError(f"a plan of {plan.nbytes} bytes at {plan.offset}")
        _check_segments(table.plans)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise EngineFileError(f"{label}: the table of plans is damaged ({where}: {first['msg']}); {_REMEDY}") from error
    except (ValueError, FaserError) as error:
        raise EngineFileError(f"{label}: the table of plans is damaged ({error}); {_REMEDY}") from error
    return table


@functools.cache
def _table_type() -> TypeAdapter[PlanTable]:
    return TypeAdapter(PlanTable)


def _check_segments(plans: tuple[Plan, ...]) -> None:
    layer = 0
    for plan in plans:
        if plan.info.kind == SEGMENT:
            if plan.info.first != layer or plan.info.last <= layer:
                raise ValueError(f"layers {plan.info.first} to {plan.info.last} where {layer} comes next")
            layer = plan.info.last
    if not layer:
        raise ValueError("no segment")
