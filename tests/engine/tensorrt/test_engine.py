"""The TensorRT engine over a stand-in of TensorRT's runtime: meaning, refusals, contexts and order.

What runs on a GPU only is in test_gpu.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.dry_gpu import HostRuntime
from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.builder.plan_file import Requirements
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.gpu.decoder import Placement
from faser_trtllm.engine.gpu.engine import GpuEngine
from faser_trtllm.engine.gpu.limits import GpuLimits
from faser_trtllm.engine.gpu.open import open_pair
from faser_trtllm.engine.opening import OpenRequest
from faser_trtllm.engine.tensorrt.engine import open_engine as open_file
from faser_trtllm.engine.tensorrt.linear_batch import LinearBatch
from faser_trtllm.errors import ConfigError, EngineFileError, InvalidArgumentError
from faser_trtllm.executor.factory import assemble
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.partition.green_context import GpuPartition
from faser_trtllm.policy.static import OffPolicy
from lab.clock import ManualClock
from lab.reference.early_exit import early_exit_reference
from tests.engine.cuda.exact_ops import ExactOps
from tests.engine.cuda.host_executor import HostGpu
from tests.engine.tensorrt.files import BLOCK, SEGMENTS, WHOLE, make_networks, open_engine
from tests.engine.tensorrt.stand_in import CAPABILITY, VERSION, StandIn, make_stand_in, plans_of
from tests.support.executor_harness import Collector, ErraticPolicy
from tests.support.networks import load_trt, make_model
from tests.support.scenario import RAGGED, Rows, Scenario

trt = load_trt()
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def make(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., StandIn]:
    """Stand-ins of one model; networks are made once per flavour."""
    made: dict[str, Any] = {}

    def stand_in(flavour: str = "native", requirements: Requirements | None = None) -> StandIn:
        if flavour not in made:
            made[flavour] = make_networks(model, flavour, SEGMENTS)
        networks, built = made[flavour]
        path = tmp_path_factory.mktemp("plans") / "rank0.engine"
        return make_stand_in(path, trt, networks, built, SEGMENTS, requirements)

    return stand_in


@pytest.fixture
def reference(model: Any) -> ReferenceModel:
    return ReferenceModel(*model)


class PagedScenario(Scenario):
    """A request has blocks of BLOCK tokens, shuffled."""

    def __init__(self, engine: Any, reference: ReferenceModel, seed: int = 0) -> None:
        super().__init__(engine, reference, seed)
        spec = engine.spec
        self.block_table = self._rng.permutation(spec.num_blocks).astype(np.int32).reshape(spec.max_batch_size, -1)
        self._builder = type(self._builder)(self.block_table)


@pytest.mark.parametrize("max_seq_len", [96, 64])
@pytest.mark.parametrize("flavour", ["native", "plugin"])
def test_ragged_passes_give_the_references_logits(
    make: Callable[..., StandIn], reference: ReferenceModel, flavour: str, max_seq_len: int
) -> None:
    """Also where it is served with shorter sequences than it was built for: the block table keeps its width."""
    stand_in = make(flavour)
    blocks = 4 * max_seq_len // BLOCK
    with open_engine(stand_in, max_seq_len=max_seq_len, num_blocks=blocks) as engine:
        kind = Scenario if flavour == "native" else PagedScenario
        for seed in range(3):
            assert kind(engine, reference, seed).worst_error(RAGGED) < TOLERANCE


@pytest.mark.parametrize("flavour", ["native", "plugin"])
def test_all_is_prepared_at_the_start(make: Callable[..., StandIn], reference: ReferenceModel, flavour: str) -> None:
    """No pass makes a context once graphs were captured, not even a long prompt's, which has no graph."""
    stand_in = make(flavour)
    with open_engine(stand_in, max_graph_rows=8) as engine:
        assert engine.capture_graphs([WHOLE]) == 0
        prepared = len(stand_in.trt.contexts)
        kind = Scenario if flavour == "native" else PagedScenario
        scenario = kind(engine, reference)
        assert scenario.worst_error([*RAGGED, (Rows(0, 45, restart=True), Rows(1, 3))]) < TOLERANCE
        exits = sum("exit_rows" in context().shapes for context in stand_in.trt.contexts[prepared:])
        assert len(stand_in.trt.contexts) - prepared == exits


def test_a_scenario_is_caught_out(make: Callable[..., StandIn], reference: ReferenceModel, monkeypatch: Any) -> None:
    """The negative control: without putting rows into the network's order, the same test fails."""
    real = LinearBatch.upload

    def unordered(batch: LinearBatch, *args: Any) -> None:
        real(batch, *args)
        assert batch.row_of is not None
        batch.row_of = np.sort(batch.row_of)

    monkeypatch.setattr(LinearBatch, "upload", unordered)
    with open_engine(make()) as engine:
        assert not Scenario(engine, reference).worst_error(RAGGED) < TOLERANCE


@pytest.mark.parametrize("flavour", ["native", "plugin"])
def test_early_exit_scores_the_rows_asked_for(
    make: Callable[..., StandIn], model: Any, reference: ReferenceModel, flavour: str
) -> None:
    """Whatever the order of the cache rows, before and after rows are dropped."""
    config, weights = model
    rng = np.random.default_rng(0)
    with open_engine(make(flavour)) as engine:
        scenario = (Scenario if flavour == "native" else PagedScenario)(engine, reference, 1)
        scenario.step(RAGGED[0])
        scenario._builder.clear()
        for slot, count in ((2, 3), (0, 2), (1, 5)):
            scenario._builder.add(slot, rng.integers(0, 320, 64).astype(np.int32), 0, count, count)
        batch = scenario._builder.build()
        candidates = rng.integers(0, 320, (4, 5)).astype(np.int32)
        candidates[1, 2] = -1
        asked = np.array([0, 4, 5, 9], np.int32)
        whole = engine.run_segment(batch, 0)
        assert whole is None
        scores = engine.early_exit(asked, candidates)
        kept = np.array([0, 1, 4, 5, 6, 9], np.int32)  # not prefixes: rows keep their order all the same
        engine.compact_rows(kept)
        again = engine.early_exit(np.array([0, 2, 3, 5], np.int32), candidates)
        np.testing.assert_array_equal(again, scores)
        hidden = hidden_rows(engine, len(kept))
    norm = weights.float32("model.norm.weight", (config.hidden_size,))
    head = weights.float32("lm_head.weight", (320, config.hidden_size))
    expected = early_exit_reference(hidden[[0, 2, 3, 5]], norm, head, candidates, config.rms_norm_eps)
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE)


def hidden_rows(engine: GpuEngine, num_rows: int) -> np.ndarray:
    """The rows that segment 0 left, in the caller's order."""
    rows = engine._decoder.hidden(0)[:num_rows].numpy()
    return rows if engine._boundary._row_of is None else rows[engine._boundary._row_of]


@pytest.mark.parametrize(
    ("needs", "version", "capability", "message"),
    [
        (
            Requirements("tensorrt_rtx", "1.6.0", (CAPABILITY,), False),
            VERSION,
            CAPABILITY,
            "was built with tensorrt_rtx 1.6.0, here is tensorrt_rtx 1.7.1.116; rebuild it with faser build --backend",
        ),
        (
            Requirements("tensorrt", VERSION, (CAPABILITY,), False),
            VERSION,
            CAPABILITY,
            "was built with tensorrt 1.7.1.116, here is tensorrt_rtx",
        ),
        (
            Requirements("tensorrt_rtx", VERSION, ("8.6", "12.0"), False),
            VERSION,
            "9.0",
            "was built for compute capability 8.6, 12.0, this GPU has 9.0; rebuild it with faser build "
            "--compute_capability 9.0",
        ),
    ],
)
def test_engines_for_something_else_are_refused(
    make: Callable[..., StandIn], needs: Requirements, version: str, capability: str, message: str
) -> None:
    stand_in = make(requirements=needs)
    with pytest.raises(EngineFileError, match="rebuild it") as caught:
        open_engine(stand_in, capability)
    assert message in str(caught.value)


def test_a_portable_engine_is_for_the_runtime_to_refuse(make: Callable[..., StandIn]) -> None:
    needs = Requirements("tensorrt_rtx", VERSION, ("8.0", "12.0"), True)
    stand_in = make(requirements=needs)
    open_engine(stand_in, "9.0").close()
    stand_in.trt.validity = (
        trt.EngineValidity.INVALID,
        int(trt.EngineInvalidityDiagnostics.UNSUPPORTED_CC) | int(trt.EngineInvalidityDiagnostics.OLD_CUDA_DRIVER),
    )
    with pytest.raises(EngineFileError, match=r"does not run on this GPU \(.*UNSUPPORTED_CC.*\)") as caught:
        open_engine(stand_in, "9.0")
    assert "OLD_CUDA_DRIVER" in str(caught.value)
    assert "VERSION_MISMATCH" not in str(caught.value)


def test_damaged_and_foreign_plans_are_refused(make: Callable[..., StandIn]) -> None:
    stand_in = make()
    content = bytearray(stand_in.path.read_bytes())
    plan = plans_of(stand_in.path)[1]
    content[plan.offset] ^= 1
    stand_in.path.write_bytes(content)
    with pytest.raises(EngineFileError, match=r"the plan of layers 1 to 2 has sha256 .*rebuild"):
        open_engine(stand_in)
    content[plan.offset] ^= 1
    stand_in.path.write_bytes(content)
    stand_in.trt.extra_tensor = "surprise"
    with pytest.raises(EngineFileError, match=r"other inputs and outputs than its engine file lists \(surprise\)"):
        open_engine(stand_in)
    stand_in.trt.extra_tensor = ""
    stand_in.trt.interpret = lambda plan: None
    with pytest.raises(EngineFileError, match="cannot be deserialized"):
        open_engine(stand_in)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_len": 97}, "max_seq_len is 97, .* was built for 1 to 96"),
        ({"max_batch_size": 5}, "max_batch_size is 5"),
        ({"max_num_tokens": 0}, "max_num_tokens is 0"),
    ],
)
def test_limits_beyond_the_build_are_refused(
    make: Callable[..., StandIn], changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_engine(make(), **changes)


def test_what_is_closed_first(make: Callable[..., StandIn], reference: ReferenceModel) -> None:
    """Contexts, engines, then the runtime."""
    stand_in = make()
    engine = open_engine(stand_in)
    engine.capture_graphs([WHOLE])
    Scenario(engine, reference).worst_error(RAGGED[:3])
    stand_in.trt.log.clear()
    engine.close()
    gc.collect()
    kinds = ["context", "engine", "runtime"]
    assert stand_in.trt.log == sorted(stand_in.trt.log, key=kinds.index)
    assert set(stand_in.trt.log) == set(kinds)
    engine.close()


def test_contexts_share_scratch_memory_that_is_large_enough(
    make: Callable[..., StandIn], reference: ReferenceModel
) -> None:
    stand_in = make()
    with open_engine(stand_in) as engine:
        Scenario(engine, reference).worst_error(RAGGED)
        contexts = [context for each in stand_in.trt.contexts if (context := each()) is not None]
        assert len({context.scratch for context in contexts}) == 1
        assert contexts[0].scratch[1] == 1024 * 2 + 64 * 4
        kinds = trt.DynamicShapesKernelSpecializationStrategy
        assert {c.config.dynamic_shapes_kernel_specialization_strategy for c in contexts} == {kinds.EAGER}
        assert {c.profile for c in contexts} == {0, 1}
        assert all((c.profile == 1) == (c.shapes["positions"][0] > 24) for c in contexts)
        del contexts


def test_a_partition_has_contexts_of_its_own(make: Callable[..., StandIn], reference: ReferenceModel) -> None:
    stand_in = make()
    part = GpuPartition("part", 2, 32)
    with open_engine(stand_in) as engine:
        scenario = Scenario(engine, reference)
        step = (Rows(0, 1), Rows(1, 1))
        for partition in (WHOLE, WHOLE, part, part, WHOLE):
            engine.use(partition)
            assert scenario.worst_error([step]) < TOLERANCE
        contexts = [each() for each in stand_in.trt.contexts]
        assert sorted(context.stream for context in contexts) == [1] * (len(SEGMENTS) - 1) + [2] * (len(SEGMENTS) - 1)
        del contexts


def test_what_was_compiled_is_kept_on_disk(
    make: Callable[..., StandIn], reference: ReferenceModel, tmp_path: Path
) -> None:
    stand_in = make()
    cache_dir = tmp_path / "cache"
    for times in (1, 2):
        with open_engine(stand_in, cache_dir=cache_dir) as engine:
            Scenario(engine, reference).worst_error(RAGGED[:1])
        files = list(cache_dir.iterdir())
        assert len(files) == len(SEGMENTS) - 1
        assert all(file.read_bytes() == b"compiled " * times for file in files)
        assert all(file.name.endswith(f"-{CAPABILITY}.cache") for file in files)


@pytest.fixture(scope="module")
def engine(make: Callable[..., StandIn]) -> Iterator[GpuEngine]:
    with open_engine(make(), max_logit_rows=8) as opened:
        yield opened


def test_bad_passes_are_named(engine: GpuEngine) -> None:
    scenario = Scenario(engine, None)  # type: ignore[arg-type]
    builder = scenario._builder
    builder.clear()
    with pytest.raises(InvalidArgumentError, match="there are no hidden rows"):
        engine.compact_rows(np.zeros(1, np.int32))
    builder.add(0, np.zeros(96, np.int32), 0, 12, 12)
    with pytest.raises(InvalidArgumentError, match="logits of 12 rows, the engine was opened for 8"):
        engine.forward(builder.build())
    engine.run_segment(builder.build(), 0)
    with pytest.raises(InvalidArgumentError, match="rows is \\[3, 3\\]; it must list rows 0 to 11 ascending"):
        engine.compact_rows(np.array([3, 3], np.int32))
    with pytest.raises(InvalidArgumentError, match="rows is \\[12\\], allowed is 0 to 11"):
        engine.early_exit(np.array([12], np.int32), np.zeros((1, 2), np.int32))
    with pytest.raises(InvalidArgumentError, match="candidates have token id 320, the largest is 319"):
        engine.early_exit(np.array([1], np.int32), np.full((1, 2), 320, np.int32))
    builder.clear()
    builder.add(0, np.full(96, 320, np.int32), 0, 2, 1)
    with pytest.raises(InvalidArgumentError, match="token_ids are not all within 0 to 319"):
        engine.forward(builder.build())
    with pytest.raises(InvalidArgumentError, match="segment is 3, allowed is 0 to 2"):
        engine.run_segment(builder.build(), 3)


@pytest.mark.parametrize("flavour", ["native", "plugin"])
def test_the_executor_runs_on_it(
    make: Callable[..., StandIn], model: Any, reference: ReferenceModel, flavour: str
) -> None:
    """A model that drafts for itself on the device, with every mode, pruning at random and rejection sampling: greedy
    tokens are the reference's argmax, and seeded ones those of the engine without drafts."""
    prompts = [np.random.default_rng(seed).integers(2, 320, 3 + seed).tolist() for seed in range(6)]

    def generate(policy: Any, max_draft_len: int) -> tuple[dict[str, list[int]], int]:
        collector, clock = Collector(), ManualClock()
        with ExitStack() as stack:
            opened = open_pair(
                OpenRequest(Directory(), BuildConfig(4, 64, 96, max_draft_len, BLOCK), 24, max_draft_len > 0),
                HostGpu(),
                stack,
                lambda role, probs: open_one(make(flavour), stack, max_draft_len, probs),
            )
            executor = assemble(
                opened.target,
                opened.draft,
                policy,
                ExecutorConfig(),
                max_seq_len=96,
                max_draft_len=max_draft_len,
                clock=clock,
                resources=stack.pop_all(),
                enter_mode=opened.enter_mode,
                sampler=opened.sampler,
            )
            with executor:
                for index, prompt in enumerate(prompts):
                    seeded = {"temperature": 0.8, "seed": 7 + index} if index % 2 else {"temperature": 0.0}
                    params = SamplingParams(max_tokens=6, **seeded)
                    executor.submit(str(index), prompt, params, collector.sink(str(index)))
                while executor.step():
                    clock.advance(0.001)
                executor.check_integrity()
        accepted = sum(request.stats.num_accepted_tokens for request in collector.requests.values())
        return collector.tokens, accepted

    tokens, accepted = generate(ErraticPolicy(3, seed=1), 3)
    assert accepted > len(prompts)
    for index in range(0, len(prompts), 2):
        logits = reference.logits([*prompts[index], *tokens[str(index)][:-1]])[len(prompts[index]) - 1 :]
        assert logits.argmax(-1).tolist() == tokens[str(index)]
    assert generate(OffPolicy(), 0)[0] == tokens


class Directory:
    """Stand-in for an engine directory, with the fields that opening reads here."""

    vocab_size = 320


def open_one(stand_in: StandIn, stack: ExitStack, max_draft_len: int, draft_probs: Any) -> Any:
    place = Placement(ExactOps(), HostRuntime(), HostGpu.whole)
    limits = GpuLimits.of(BuildConfig(4, 64, 96, max_draft_len, BLOCK), 24, has_drafts=draft_probs is not None)
    engine = open_file(
        stand_in.path,
        stand_in.trt,
        place,
        CAPABILITY,
        limits,
        draft_probs=draft_probs,
    )
    return stack.enter_context(engine), place.ops
