"""The sections of the backends: the cuda engine on the host, and TensorRT's plans, built for real and interpreted."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any

import pytest

from benchmarks.gpu.backends import parity, section, soak
from benchmarks.gpu.backends.built import engine_path, open_built
from benchmarks.gpu.backends.passes import time_passes
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.dry_gpu import DryGpu, HostRuntime
from benchmarks.gpu.machine import DryMachine
from benchmarks.gpu.options import GpuBenchOptions
from benchmarks.gpu.report.record import Record
from benchmarks.gpu.section_process import run_entry
from faser_trtllm import fingerprint
from faser_trtllm.core.cost_table import Fingerprint
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.errors import ConfigError
from faser_trtllm.profiling import profile
from tests.benchmarks.gpu.backends.stand_in import stand_in_of
from tests.benchmarks.gpu.harness import ENTRIES, bench_on, walk
from tests.support.effort import ONLY_ALL
from tests.support.networks import load_trt
from tests.support.policies import choose_policy


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "DRY_JOBS_PER_LAP", 2)
    monkeypatch.setattr(section, "SETTINGS", ("fixed:2",))
    monkeypatch.setattr(profile, "QUICK_BUDGET_S", 0.05)


@pytest.fixture
def longer(options: GpuBenchOptions) -> GpuBenchOptions:
    """Tokens enough for drafts to be pruned in every mode."""
    return dataclasses.replace(options, max_tokens=16)


@pytest.fixture
def stack() -> Any:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def machine(options: GpuBenchOptions, stack: ExitStack) -> DryMachine:
    """TensorRT for RTX by the stand-in."""
    trt, checkpoints = load_trt(), (options.checkpoint_dir, options.draft_checkpoint_dir)
    return DryMachine(tensorrt=lambda engines: stand_in_of(trt, engines, *checkpoints, stack))


def table_of(found: dict[str, Any], title: str) -> list[list[str]]:
    (rows,) = (table["rows"] for table in found["tables"] if table["title"] == title)
    return rows


@ONLY_ALL
def test_cuda_is_built_decoded_timed_and_soaked(longer: GpuBenchOptions) -> None:
    found = walk("cuda", longer)
    speculation = {row[0]: row[2:] for row in table_of(found, "Greedy tokens against those without speculation")}
    modes = ("serial", "draft_ahead", "ping_pong")
    assert list(speculation) == [*section.SETTINGS, *(f"pruned, {mode}" for mode in modes), "price"]
    for policy, (num_pruned, *_, num_faults) in speculation.items():
        assert num_faults == "0"
        assert (int(num_pruned) > 0) == policy.startswith("pruned")
    assert found["values"]["memory growth MiB"] == 0
    assert set(found["values"]["verify ms"]) >= {"1", "2", "4", "8", "16", "24", "32"}


@ONLY_ALL
def test_tensorrt_rtx_says_what_cuda_says(options: GpuBenchOptions, machine: DryMachine) -> None:
    found = walk("tensorrt_rtx", options, machine)
    ((num_rows, _, _, _, largest, num_far),) = table_of(found, "Logits against those of cuda, by row")
    assert (num_rows, num_far) == ("18", "0")
    assert 0 < float(largest) < 0.1
    ((_, num_same, num_ties, num_faults),) = table_of(found, "Greedy tokens against those of cuda, without speculation")
    assert (int(num_same) + int(num_ties), num_faults) == (3, "0")
    speculation = table_of(found, "Greedy tokens against those without speculation")
    assert int(next(row[2] for row in speculation if row[0] == "pruned, serial")) > 0


def test_without_a_gpu_plans_are_built_and_not_run(options: GpuBenchOptions) -> None:
    load_trt()
    record = Record()
    run_entry(ENTRIES["tensorrt_rtx"], options, record, 120.0)
    assert record.data["status"] == "skipped: TensorRT's plans run on a GPU only"
    assert table_of(record.data, "The trained pair, built")
    run_entry(ENTRIES["tensorrt"], options, record, 120.0)
    assert record.data["status"].startswith("skipped: ")


def test_other_logits_and_other_tokens_are_found(options: GpuBenchOptions) -> None:
    """A reference that is not this engine's: one row's logits are another's, and one token is an unlikely one."""
    bench = bench_on(options)
    with open_built(bench, "cuda") as pair:
        reference = parity.read_reference(bench, pair)
        parity.compare(bench, pair, reference)
        assert not bench.record.data["errors"]
        assert table_of(bench.record.data, "Logits against those of cuda, by row")[0][1:3] == ["18", "18"]
        logits = reference.logits[1].copy()
        logits[3] = logits[3][::-1]
        parity.compare(
            bench, pair, dataclasses.replace(reference, logits=(reference.logits[0], logits, *reference.logits[2:]))
        )
        assert bench.record.data["errors"] == ["1 of 18 rows of cuda have other logits than cuda's"]
        tokens = [list(each) for each in reference.token_ids]
        tokens[2][5] = int(reference.logits[2][5].argmin())
        parity.compare(bench, pair, dataclasses.replace(reference, token_ids=tuple(map(tuple, tokens))))
        assert "cuda: request 2 parts from cuda at token 5" in bench.record.data["errors"][1]


class LeakyRuntime(HostRuntime):
    """Every pass costs memory that stays."""

    num_bytes = 0

    def now(self) -> Any:
        type(self).num_bytes += 1 << 20
        return super().now()

    def memory_bytes(self) -> int:
        return self.num_bytes


class LeakyGpu(DryGpu):
    def make_runtime(self) -> Runtime:
        return LeakyRuntime()


@ONLY_ALL
def test_memory_that_stays_is_found(options: GpuBenchOptions) -> None:
    bench = Bench(options, DryMachine(gpu=LeakyGpu()), Record())
    with open_built(bench, "cuda") as pair:
        soak.soak(bench, pair)
    (error,) = bench.record.data["errors"]
    assert "MiB more after 12 laps than after 8, allowed are 16" in error
    assert bench.record.data["values"]["memory growth MiB"] > 16


class Machine(DryMachine):
    """Whose cost tables are of a GPU."""

    def fingerprint(self, made_of: bytes) -> Fingerprint:
        return fingerprint.gpu_fingerprint(made_of)


def test_price_goes_by_the_table_that_is_written(options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies where that of `faser profile` does, and is for the same machine and engines."""
    monkeypatch.setattr(fingerprint, "gpu_model", lambda: ("A GPU", "sm_90, driver 13.0", 132))
    bench = Bench(options, Machine(), Record())
    path = engine_path(bench, "cuda")
    with open_built(bench, "cuda") as pair:
        (path / fingerprint.PROFILE).unlink(missing_ok=True)
        assert choose_policy(path, "auto", 1, 4, 4).name == "fixed:4"
        table = time_passes(bench, pair)
    assert fingerprint.load_costs(path, 1) == table
    assert choose_policy(path, "auto", 1, 4, 4).name == "price"
    monkeypatch.setattr(fingerprint, "gpu_model", lambda: ("B GPU", "sm_90, driver 13.0", 132))
    with pytest.raises(ConfigError, match="cpu_model is 'A GPU' there and 'B GPU' here"):
        fingerprint.load_costs(path, 1)
