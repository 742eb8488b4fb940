from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from faser_trtllm.builder.engine_file import EngineFile
from faser_trtllm.builder.network.options import NetworkOptions, TensorSpec
from faser_trtllm.builder.plan_file import (
    EARLY_EXIT,
    PLAN_ALIGNMENT,
    SEGMENT,
    PlanFile,
    PlanFileWriter,
    PlanInfo,
    Requirements,
    arch_capability,
)
from faser_trtllm.errors import EngineFileError

NETWORK = NetworkOptions("bfloat16", 4, 64, 96, 96, 64, profile_rows=(16,))
REQUIREMENTS = Requirements("tensorrt_rtx", "1.7.1.116", ("8.6", "12.0"), portable=False)
PLANS = [np.random.default_rng(seed).bytes(size) for seed, size in enumerate((5000, 1, 4096))]


def info(kind: str, first: int, last: int) -> PlanInfo:
    return PlanInfo(
        kind=kind,
        first=first,
        last=last,
        flavour="native",
        specification="ab" * 32,
        inputs=(TensorSpec("token_ids", "int32", ("rows",)), TensorSpec("k_cache_0", "bfloat16", ("batch", 2, 96, 16))),
        outputs=(TensorSpec("hidden_out", "bfloat16", ("rows", 64)),),
        plugins=("faser::append_kv",),
        profiles=({"token_ids": ((1,), (16,), (16,))}, {"token_ids": ((1,), (16,), (64,))}),
    )


INFOS = (info(SEGMENT, 0, 3), info(SEGMENT, 3, 4), info(EARLY_EXIT, 0, 4))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "target" / "rank0.engine"
    path.parent.mkdir()
    with PlanFileWriter(path, REQUIREMENTS, NETWORK) as writer:
        for each, plan in zip(INFOS, PLANS, strict=True):
            writer.add(each, memoryview(plan))
    return path


def test_what_is_written_is_read(path: Path) -> None:
    with PlanFile.open(path) as file:
        assert file.requirements == REQUIREMENTS
        assert file.network == NETWORK
        assert tuple(plan.info for plan in file.plans) == INFOS
        assert [plan.info for plan in file.segments] == list(INFOS[:2])
        assert file.early_exit is file.plans[2]
        for plan, content in zip(file.plans, PLANS, strict=True):
            assert plan.offset % PLAN_ALIGNMENT == 0
            assert plan.sha256 == hashlib.sha256(content).hexdigest()
            with file.view(plan) as view:
                assert bytes(view) == content


def test_a_plan_is_never_copied_as_a_whole(tmp_path: Path) -> None:
    plan = np.zeros(64 << 20, np.uint8)
    path = tmp_path / "rank0.engine"
    tracemalloc.start()
    try:
        with PlanFileWriter(path, REQUIREMENTS, NETWORK) as writer:
            writer.add(info(SEGMENT, 0, 1), memoryview(plan))
        with PlanFile.open(path) as file, file.view(file.plans[0]) as view:
            assert view.nbytes == plan.nbytes
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_half_a_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "rank0.engine"

    def write() -> None:
        with PlanFileWriter(path, REQUIREMENTS, NETWORK) as writer:
            writer.add(INFOS[0], memoryview(PLANS[0]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    with pytest.raises(EngineFileError, match="is not a TensorRT engine file"):
        PlanFile.open(path)


@pytest.mark.parametrize(
    ("start", "replacement", "message"),
    [
        (0, b"FASERENG", "is not a TensorRT engine file of faser"),
        (8, b"\x02", "has version 2, this faser reads 1"),
        (-1, b"", r"\d+ bytes where \d+ were written"),
        (-40, b"x", "the table of plans is damaged"),
    ],
)
def test_damage_is_named(path: Path, start: int, replacement: bytes, message: str) -> None:
    content = path.read_bytes()
    start %= len(content)
    end = start + len(replacement) if replacement else len(content)
    path.write_bytes(content[:start] + replacement + content[end:])
    with pytest.raises(EngineFileError, match=message) as caught:
        PlanFile.open(path)
    assert str(caught.value).startswith("target/rank0.engine")
    assert str(caught.value).endswith("rebuild it with faser build")
    assert "\n" not in str(caught.value)


def test_every_cut_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    for size in (*range(70), 4096, 9000, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(EngineFileError):
            PlanFile.open(path)


@pytest.mark.parametrize(
    ("infos", "message"),
    [((info(SEGMENT, 1, 4),), "layers 1 to 4 where 0"), ((info(EARLY_EXIT, 0, 4),), "no segment")],
)
def test_segments_must_follow_each_other(tmp_path: Path, infos: tuple[PlanInfo, ...], message: str) -> None:
    path = tmp_path / "rank0.engine"
    with PlanFileWriter(path, REQUIREMENTS, NETWORK) as writer:
        for each in infos:
            writer.add(each, memoryview(b"plan"))
    with pytest.raises(EngineFileError, match=message):
        PlanFile.open(path)


def test_a_damaged_plan_is_named(path: Path) -> None:
    content = bytearray(path.read_bytes())
    with PlanFile.open(path) as file:
        plan = file.plans[1]
    content[plan.offset] ^= 1
    path.write_bytes(content)
    with PlanFile.open(path) as file:
        with pytest.raises(EngineFileError, match="the plan of layers 3 to 3 has sha256"):
            file.view(plan)
        file.view(plan, verify=False).release()


def test_the_cpu_engine_says_what_it_was_given(path: Path) -> None:
    with pytest.raises(EngineFileError, match=r"target/rank0\.engine is a TensorRT engine, .* --backend cpu"):
        EngineFile.open(path)


@pytest.mark.parametrize(("arch", "capability"), [("sm_80", "8.0"), ("sm_90a", "9.0"), ("sm_120", "12.0")])
def test_names_of_architectures(arch: str, capability: str) -> None:
    assert arch_capability(arch) == capability
