"""Every section of the GPU suite, walked through on the CPU with tiny shapes; kernels by the emulator where it matters.

What this cannot show: that it works on a GPU, and any time. The gpu-marked test at the end has not been run.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser_trtllm.bench.gpu import calibration, costs, exactness, fp8, kernels, policies, prompts
from faser_trtllm.bench.gpu.bench import Bench
from faser_trtllm.bench.gpu.cuda_engines import PairLimits, device_weights
from faser_trtllm.bench.gpu.machine import DryMachine, num_copies
from faser_trtllm.bench.gpu.options import GpuBenchOptions
from faser_trtllm.bench.gpu.pair import open_pair
from faser_trtllm.bench.gpu.record import Record
from faser_trtllm.bench.gpu.section_process import run_entry
from faser_trtllm.bench.gpu.sections import SECTIONS
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.errors import ConfigError
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.enlarge import DecoderShape, EnlargedWeights
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.profiling import exit_models
from tests.checkpoints import make_pair
from tests.ops.cuda.emulation import emulated

ENTRIES = {section.name: section.entry for section in SECTIONS}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> GpuBenchOptions:
    root = tmp_path_factory.mktemp("gpu_sections")
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "vocab_size": 300}
    target, draft = make_pair(root / "pair", **sizes)  # type: ignore[arg-type]
    (root / "out").mkdir()
    return GpuBenchOptions(target, draft, root / "out", forms=("1B",), fixed=(2,), max_tokens=6, dry_run=True)


def walk(name: str, options: GpuBenchOptions, machine: DryMachine | None = None) -> dict[str, Any]:
    record = Record()
    run_entry(ENTRIES[name], options, record, 120.0, machine)
    assert record.data["status"] == "ok", record.data["errors"]
    return record.data


def bench_on(options: GpuBenchOptions, launchers: Any = None) -> Bench:
    return Bench(options, DryMachine(launchers), Record())


def emulator(stem: str, defines: Mapping[str, int] | None) -> Any:
    return emulated(stem, defines)


@pytest.mark.parametrize("name", ["environment", "gemms", "steps", "partitions"])
def test_sections_walk_their_plan(options: GpuBenchOptions, name: str) -> None:
    found = walk(name, options)
    assert found["tables"]
    assert all(table["rows"] for table in found["tables"])


def test_kernels_agree_with_their_references(options: GpuBenchOptions) -> None:
    """The very kernels, on the CPU: launches, arguments and comparisons of the section are right."""
    found = walk("kernels", options, DryMachine(emulator))
    for op in kernels.FAMILIES:
        for result in found["values"][op]:
            assert result["error"] <= 1.0
            assert result["ms"] is not None


@pytest.mark.parametrize("stem", list(kernels.FAMILIES))
def test_a_kernel_that_writes_nothing_is_found(options: GpuBenchOptions, stem: str) -> None:
    class Silent:
        def launch(self, *arguments: Any) -> None:
            """Leaves the outputs as they were."""

    bench = bench_on(options, lambda name, defines: Silent() if name == stem else emulator(name, defines))
    kernels._family(bench, stem, kernels.FAMILIES[stem])
    assert any("is WRONG" in line for line in bench.record.data["errors"])


def test_a_law_that_is_wrong_is_found(options: GpuBenchOptions) -> None:
    """Drafts accepted without a test: a chi-square that sees nothing wrong in it would be no test."""

    class Credulous:
        def launch(self, kernel: str, grid: Any, block: Any, arguments: Any, stream: int = 0) -> None:
            inner.launch(kernel, grid, block, arguments, stream)
            if kernel == "accept":
                case.result.token_ids[:, 0] = torch.from_numpy(case.host_drafts)

    inner = emulator("accept", None)
    bench = bench_on(options, emulator)
    exactness._law_of_accept(bench)
    assert not bench.record.data["errors"]

    class Recorded(exactness.AcceptCase):
        def __init__(self, machine: Any, mode: int, logits: Any, drafts: Any, *rest: Any) -> None:
            nonlocal case
            super().__init__(machine, mode, logits, drafts, *rest)
            self.host_drafts = drafts[:, 0].astype(np.int32)
            case = self

    case: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactness, "AcceptCase", Recorded)
        bench = bench_on(options, lambda stem, defines: Credulous())
        exactness._law_of_accept(bench)
    assert "another law" in bench.record.data["errors"][0]


def test_exactness_finds_no_fault(options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "SPELLINGS", ("fixed:2", "fixed:2,mode=draft_ahead"))
    monkeypatch.setattr(exactness, "DRY_NUM_SAMPLES", 12)
    found = walk("exactness", options)
    assert found["values"]["num_faults"] == 0
    table = found["tables"][0]
    assert [row[0] for row in table["rows"]] == ["fixed:2", "fixed:2,mode=draft_ahead"]
    assert all(row[-1] == "0" for row in table["rows"])


def test_exactness_finds_a_fault(options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token changed to an unlikely one: its logit is far from the best."""
    honest = exactness.tokens_of

    def wrong(pair: Any, spelling: str, jobs: Any, concurrency: int) -> Any:
        tokens = honest(pair, "off", jobs, concurrency)
        if spelling == "off":
            return tokens
        known = [*jobs[0].prompt, *tokens[0][:2]]
        worst = int(exactness.last_logits(pair, known, 1).argmin())
        return ((*tokens[0][:2], worst, *tokens[0][3:]), *tokens[1:])

    monkeypatch.setattr(exactness, "tokens_of", wrong)
    bench = bench_on(options)
    with open_pair(bench, "1B", PairLimits(2, 48, 64)) as pair:
        exactness.greedy(bench, pair, 2, ("fixed:2",))
    assert bench.record.data["values"]["num_faults"] == 1
    assert "request 0 parts at token 2" in bench.record.data["errors"][0]


def test_a_pass_gives_the_same_logits_in_pieces(options: GpuBenchOptions) -> None:
    """last_logits, whatever the rows of its last pass, are those of the trained model in fp32, to bf16's error."""
    tokens = list(np.random.default_rng(0).integers(2, 290, 30))
    config = load_model_config(options.checkpoint_dir)
    with CheckpointWeights(options.checkpoint_dir) as weights:
        wanted = ReferenceModel(config, weights).logits(tokens)[-1].numpy()
    with open_pair(bench_on(options), "1B", PairLimits(2, 48, 16)) as pair:
        for rows in (1, 5, 30):
            found = exactness.last_logits(pair, tokens, rows)
            assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


def test_cost_tables_serve_the_policies(options: GpuBenchOptions) -> None:
    found = walk("costs", options)
    assert "error 1B" in found["values"]
    assert found["values"]["overhead_ms 1B"] > 0
    table = CostTable.from_json(json.loads((options.output_dir / costs.cost_file("1B")).read_text()))
    assert table.num_segments == 2
    assert set(table.partitions) == {"all", "verify"}
    assert table.interference_of("draft", "verify") is not None
    for spelling in ("schedule", "price"):
        make_policy(spelling, 4, table, 2)


def test_exits_are_calibrated_on_real_drafts(options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "DRY_NUM_PROMPTS", 10)
    monkeypatch.setattr(exit_models, "MIN_OBSERVATIONS", 40)
    bench = bench_on(dataclasses.replace(options, max_tokens=16))
    with open_pair(bench, "1B", PairLimits(5, 48, 64), overlap=True) as pair:
        table = costs.measure_table(bench, pair, 16, 0.1)
        whole = calibration.calibrated(bench, pair, table)
    assert [model.boundary for model in whole.exits] == [1]
    assert whole.curves == table.curves
    assert bench.record.data["tables"][-1]["rows"]


def test_policies_are_measured_on_the_same_requests(options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "NUM_ROUNDS", 2)
    monkeypatch.setattr(policies, "OVERLAPPED", {"fixed:4 ping_pong": "fixed:4,mode=ping_pong"})
    found = walk("policies", options)
    rates = found["tables"][0]
    assert rates["header"] == ["system", "1", "2"]
    names = [row[0] for row in rates["rows"]]
    assert names[0] == "off"
    assert {"fixed:2", "fixed:4 ping_pong", "schedule", "gp_lcb", "price", "price+pruning"} <= set(names)
    assert all(cell != "-" for row in rates["rows"] for cell in row)


def test_slow_fixed_lengths_are_left_out_after_the_first_round() -> None:
    class Rate:
        def __init__(self, tokens_per_s: float) -> None:
            self.tokens_per_s = tokens_per_s

    names = ["off", "fixed:1", "fixed:2", "fixed:3", "fixed:4 ping_pong"]
    results: Any = {(4, f"fixed:{k}"): [Rate(k)] for k in (1, 2, 3)}
    assert policies._kept(names, results, 4, 0) == names
    assert policies._kept(names, results, 4, 1) == ["off", "fixed:2", "fixed:3", "fixed:4 ping_pong"]


def test_peers_run_the_same_weights(options: GpuBenchOptions) -> None:
    """transformers, with the enlarged weights, says what the engine says."""
    pytest.importorskip("transformers")
    found = walk("peers", options)
    rows = found["tables"][0]["rows"]
    assert [row[1] for row in rows] == ["off / generate", "fixed:4 / assisted:4", "fixed:8 / assisted:8"]
    assert rows[0][-1].startswith("100.0% / ")
    assert float(rows[0][-1].split()[-1].rstrip("%")) > 50


def test_device_weights_are_those_of_a_file(tmp_path: Path, options: GpuBenchOptions) -> None:
    """Fused and named as the builder does."""
    from faser_trtllm.builder.cuda_engine import CudaBackend
    from faser_trtllm.builder.cuda_engine_file import CudaFile
    from faser_trtllm.builder.engine_dir import BuildConfig
    from faser_trtllm.builder.source import Source
    from faser_trtllm.engine.cuda_weights import DeviceWeights, LayerWeights

    config = load_model_config(options.checkpoint_dir)
    with CheckpointWeights(options.checkpoint_dir) as weights:
        made = EnlargedWeights(weights, config, DecoderShape(64, 80, 3, 4, 2, 64))
        source = Source("target", tmp_path, made.config, made, (0, 3), ())
        path = tmp_path / "rank0.engine"
        CudaBackend("bfloat16").write_engine(path, source, BuildConfig(2, 16, 40, 2, 32), None)
        with CudaFile.open(path) as file:
            wanted = DeviceWeights.load(file, torch.device("cpu"))
        found = device_weights(made, 40, torch.device("cpu"))
    assert dict(found.sizes) == dict(wanted.sizes)
    for name in ("embedding", "final_norm", "lm_head", "cos", "sin"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    for left, right in zip(found.layers, wanted.layers, strict=True):
        for name in LayerWeights.__slots__:
            a, b = getattr(left, name), getattr(right, name)
            assert a is b is None or torch.equal(a, b), name


def test_fp8_is_compared_with_bf16(options: GpuBenchOptions) -> None:
    """The same weights in both, so their passes differ, their tokens hardly, and speculation changes neither."""
    only = lambda stem, defines: emulator(stem, defines) if stem == "quantize_rows" else None  # noqa: E731
    found = walk("fp8", options, DryMachine(only))
    assert found["values"]["num_faults"] == 0
    products, passes, memory, _ = found["tables"]
    assert [row[0] for row in products["rows"]] == ["1", "4"]
    assert all(row[-1] == "0" for row in products["rows"]), "on the CPU a row is the same alone"
    assert 0 < found["values"]["error of a product"] < 0.004, "bf16's rounding of the result"
    assert {row[0] for row in passes["rows"]} == {"1", "2"}
    assert float(memory["rows"][1][1]) < float(memory["rows"][0][1])
    assert 0 < found["values"]["tokens as in bf16"] <= 1


def test_fp8_without_fp8_is_said_and_no_fault(options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Any) -> None:
        raise ConfigError("quantization is fp8, and this GPU has none")

    monkeypatch.setattr(fp8, "check_product", refuse)
    record = Record()
    run_entry(ENTRIES["fp8"], options, record, 120.0, None)
    assert record.data["status"] == "ok"
    assert record.data["values"] == {"not run": "quantization is fp8, and this GPU has none"}


def test_inputs_rotate_until_they_outgrow_the_cache() -> None:
    assert num_copies(10, 100) == 40
    assert num_copies(500, 100) == 1
    assert num_copies(1, 10**9) == 64


def test_the_chi_square_tail_is_close_to_the_tables() -> None:
    for statistic, freedom, p in ((3.841, 1, 0.05), (18.307, 10, 0.05), (37.566, 20, 0.01), (10.0, 10, 0.4405)):
        assert math.isclose(exactness.chi_square_tail(statistic, freedom), p, abs_tol=3e-3)
    assert exactness.chi_square_tail(5.0, 0) == 1.0


def test_two_samples_of_one_law_pass_and_of_two_laws_do_not() -> None:
    rng = np.random.default_rng(1)

    def sample(p: list[float]) -> Counter[tuple[int, ...]]:
        return Counter((int(i),) for i in rng.choice(4, 2000, p=p))

    same = exactness.two_samples(sample([0.5, 0.3, 0.199, 0.001]), sample([0.5, 0.3, 0.199, 0.001]))
    other = exactness.two_samples(sample([0.5, 0.3, 0.199, 0.001]), sample([0.42, 0.38, 0.199, 0.001]))
    assert exactness.chi_square_tail(*same) > 1e-3
    assert exactness.chi_square_tail(*other) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(ENTRIES))
def test_on_a_gpu(options: GpuBenchOptions, name: str) -> None:
    """Every section as it is meant, on a form that is quick. Not run yet."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    given = dataclasses.replace(options, dry_run=False, concurrency=(1, 4), prompt_len=16, max_tokens=16)
    record = Record()
    run_entry(ENTRIES[name], given, record, 100.0)
    assert record.data["status"] == "ok", record.data["errors"]
