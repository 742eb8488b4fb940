"""plugins/cuda/KERNELS.md is what the code gives, and the model behaves as its parts say."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from benchmarks.gpu import kernel_table
from benchmarks.gpu.kernels import expected
from benchmarks.gpu.kernels.checks import FAMILIES
from benchmarks.gpu.kernels.cubin import Code
from benchmarks.gpu.kernels.passes import CLAIMS, measured
from benchmarks.gpu.options import GpuBenchOptions
from faser_trtllm.errors import ConfigError
from faser_trtllm.ops.cuda.compiler import nvcc_version, stems
from lab.costmodel.gpu import find_gpu

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # nvcc, where its cubins are not in the cache
GPU = find_gpu("h100")


@pytest.fixture(scope="module")
def cases() -> list[expected.RecordedCase]:
    try:
        nvcc_version()
    except ConfigError as error:
        pytest.skip(str(error))
    return expected.recorded(GpuBenchOptions(Path(), Path(), Path()), FAMILIES)


def test_the_page_is_that_of_the_code(cases: list[expected.RecordedCase]) -> None:
    """nvcc's registers and instructions are those of one version, the one that constraints.txt pins."""
    text = kernel_table.PAGE.read_text()
    version = re.search(r"as nvcc ([\d.]+) compiles", text)
    assert version is not None
    if version[1] != ".".join(map(str, nvcc_version())):
        pytest.skip(f"the page is nvcc {version[1]}'s; install what constraints.txt pins")
    assert kernel_table.page() == text, "run faser bench gpu.kernel_table"


def test_every_measured_time_is_of_a_case(cases: list[expected.RecordedCase]) -> None:
    shapes = {(each.case.op, each.case.shape) for each in cases}
    times = measured()["kernels_us"]
    assert {(op, shape) for op, found in times.items() for shape in found} <= shapes
    assert {run for found in times.values() for by_run in found.values() for run in by_run} == set(measured()["runs"])


def test_the_model_is_near_what_an_h200_measured(cases: list[expected.RecordedCase]) -> None:
    """Only the layers' kernels, which passes consist of: sampling's model has the launches and bytes of one kind."""
    modeled = expected.times_of(cases, find_gpu("h200"))
    # The H200 ran chunks of 512 positions for few requests, too, as launches for one SM have them.
    attention = {"verify_attention": FAMILIES["verify_attention"]}
    long_chunks = expected.recorded(GpuBenchOptions(Path(), Path(), Path()), attention, num_sms=1)
    modeled |= expected.times_of(long_chunks, find_gpu("h200"))
    # The H200 ran another attention: with a second launch for each long context, and with more instructions.
    for ops, least, count in ((("append_kv", "gated_silu"), 0.6, 5), (("verify_attention",), 0.45, 20)):
        ratios = [
            modeled[op, shape] / found["h200"]
            for op in ops
            for shape, found in measured()["kernels_us"][op].items()
            if "h200" in found
        ]
        assert len(ratios) > count
        assert least < min(ratios) < max(ratios) < 1.6
    for claim in CLAIMS[:4]:
        wall_ms = claim.measured_ms("h200")
        assert wall_ms is not None
        assert claim.modeled_ms(modeled, "h200") == pytest.approx(wall_ms, rel=0.1)


def test_no_case_is_faster_than_its_bytes_or_its_launches(cases: list[expected.RecordedCase]) -> None:
    for each in cases:
        bytes_us = each.case.num_bytes / (1e6 * GPU.gb_per_ms)
        assert expected.modeled_us(each, GPU) > max(bytes_us, expected.LAUNCH_US * len(each.launches) * 0.999)


def test_more_of_anything_takes_longer(cases: list[expected.RecordedCase]) -> None:
    one = next(each for each in cases if len(each.case.walks) == len(each.launches) == 1)
    ((number, tokens),) = one.case.walks
    more = {"num_bytes": 2 * one.case.num_bytes, "more_bytes": 1e6, "num_issued": 1e6, "walks": ((number, 2 * tokens),)}
    for name, value in more.items():
        changed = dataclasses.replace(one, case=dataclasses.replace(one.case, **{name: value}))
        assert expected.modeled_us(changed, GPU) > expected.modeled_us(one, GPU)
    waves = dataclasses.replace(one, case=dataclasses.replace(one.case, walks=((10_000, tokens),)))
    assert expected.modeled_us(waves, GPU) > expected.modeled_us(one, GPU)
    twice = dataclasses.replace(one, launches=one.launches * 2)
    assert expected.modeled_us(twice, GPU) > expected.modeled_us(one, GPU)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_threads", "blocks"),
    [(16, 0, 32, 32), (32, 0, 128, 16), (40, 0, 128, 12), (65, 0, 512, 1), (32, 49152, 128, 4), (245, 0, 128, 2)],
)
def test_blocks_per_sm_are_limited_by_each_resource(
    registers: int, shared_bytes: int, num_threads: int, blocks: int
) -> None:
    code = Code("kernel", registers, 0, shared_bytes, 1, 0, 0)
    assert code.blocks_per_sm(num_threads) == blocks


def test_a_walk_is_the_inner_loop_of_matrix_instructions(cases: list[expected.RecordedCase]) -> None:
    """One iteration of a warp: a tile's rows over 64 positions, by products of 16 x 8 x 16 in both matrices."""
    seen = set()
    for launch in (launch for each in cases for launch in each.launches):
        code, tile = launch.code("sm_90"), re.fullmatch(r"verify_attention_\w+_h(\d+)_m(\d+)", launch.kernel)
        if tile is not None:
            head_dim, tile_rows = int(tile[1]), int(tile[2])
            products = 2 * tile_rows * head_dim * expected.WALK_TOKENS // (16 * 8 * 16)
            assert code.walk_mma * launch.num_threads // 32 == products
            assert code.walk_mma < code.walk < code.instructions
            seen.add(launch.kernel)
    assert len(seen) >= 4


def test_every_file_of_kernels_has_a_case(cases: list[expected.RecordedCase]) -> None:
    """Only set_conditional has none, one thread that runs in a graph of its own."""
    assert {launch.stem for each in cases for launch in each.launches} == set(stems()) - {"set_conditional"}
