"""The TensorRT engine over a stand-in of the GPU and of TensorRT's runtime: meaning, refusals, memory and order.

What runs on a GPU only is in test_tensorrt_gpu.py.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser_trtllm.builder.network.early_exit import build_early_exit
from faser_trtllm.builder.network.segment import build_segment, create_network
from faser_trtllm.builder.plan_file import Requirements
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.clock import ManualClock
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.tensorrt import TensorRTEngine
from faser_trtllm.engine.tensorrt_device import Device, GpuPartition
from faser_trtllm.errors import ConfigError, EngineFileError, InvalidArgumentError
from faser_trtllm.executor.factory import assemble
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.ops.early_exit import early_exit_reference
from tests.builder.network.networks import load_trt, make_model, new_builder, one_thread, options  # noqa: F401
from tests.builder.network.plugin_stand_in import StandInNetwork
from tests.builder.network.plugin_stand_in import StandInTrt as PluginTrt
from tests.builder.network.scenario import RAGGED, Rows, Scenario
from tests.engine.tensorrt_stand_in import CAPABILITY, VERSION, StandIn, StandInDevice, make_stand_in, plans_of
from tests.executor.harness import Collector, ErraticPolicy

trt = load_trt()
TOLERANCE = 5e-5
SEGMENTS = (0, 1, 3, 4)
EXTRA = ("enqueue", "is_capturing")  # what the stand-in's runtime asks its device
BLOCK = 16


def make_networks(model: Any, flavour: str, segments: tuple[int, ...], **changes: Any) -> Any:
    """-> networks with their plugin nodes, and the options."""
    block = BLOCK if flavour == "plugin" else 96
    built = options(**({"tokens_per_block": block, "profile_rows": (24,)} | changes))
    config = model[0]
    networks = []
    for first, last in pairwise(segments):
        network: Any = create_network(trt, new_builder(trt))
        if flavour == "plugin":
            network = StandInNetwork(network, config.num_heads)
            segment = build_segment(PluginTrt(trt), network, *model, first, last, built)
            networks.append((segment, network.plugin_nodes()))
        else:
            networks.append((build_segment(trt, network, *model, first, last, built), ()))
    if len(segments) > 2:
        networks.append((build_early_exit(trt, create_network(trt, new_builder(trt)), *model, built), ()))
    return networks, built


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


def open_engine(stand_in: StandIn, **changes: Any) -> TensorRTEngine:
    with_plugins = bool(plans_of(stand_in.path)[0].info.plugins)
    settings = {
        "num_blocks": 4 * 96 // BLOCK if with_plugins else 4,
        "max_batch_size": 4,
        "max_num_tokens": 64,
        "max_seq_len": 96,
        "max_logit_rows": 64,
    } | changes
    partition = settings.pop("partition", None) or GpuPartition("whole", stand_in.device.create_stream())
    return TensorRTEngine.open(stand_in.path, stand_in.trt, stand_in.device, partition, **settings)  # type: ignore[arg-type]


@pytest.fixture
def reference(model: Any) -> ReferenceModel:
    return ReferenceModel(*model)


class PagedScenario(Scenario):
    """A request has blocks of BLOCK tokens, shuffled."""

    def __init__(self, engine: Any, reference: ReferenceModel, seed: int = 0) -> None:
        super().__init__(engine, reference, seed)
        spec = engine.spec
        self.block_table = self._rng.permutation(spec.num_blocks).astype(np.int32).reshape(spec.max_batch_size, -1)
        self._builder = type(self._builder)(
            spec.max_batch_size, spec.max_num_tokens, spec.max_seq_len, self.block_table
        )


@pytest.mark.parametrize("flavour", ["native", "plugin"])
def test_ragged_passes_give_the_references_logits(
    make: Callable[..., StandIn], reference: ReferenceModel, flavour: str
) -> None:
    """Twice: the second time over, every pass that fits a bucket is a captured graph's replay."""
    stand_in = make(flavour)
    with open_engine(stand_in) as engine:
        kind = Scenario if flavour == "native" else PagedScenario
        for seed in range(3):
            assert kind(engine, reference, seed).worst_error(RAGGED) < TOLERANCE
        assert stand_in.device.num_replays > 3


def test_a_scenario_is_caught_out(make: Callable[..., StandIn], reference: ReferenceModel, monkeypatch: Any) -> None:
    """The negative control: without putting rows into the network's order, the same test fails."""
    from faser_trtllm.engine import tensorrt

    real = tensorrt.padded_inputs

    def unordered(*args: Any) -> Any:
        inputs = real(*args)
        return type(inputs)(inputs.arrays, inputs.sizes, np.sort(inputs.network_row))

    monkeypatch.setattr(tensorrt, "padded_inputs", unordered)
    with open_engine(make()) as engine:
        assert not Scenario(engine, reference).worst_error(RAGGED) < TOLERANCE


def test_host_memory_is_not_reused_too_early(make: Callable[..., StandIn]) -> None:
    """Two first segments of passes that are then given up, waited for one by one or not at all."""

    class Forgetful(set[int]):
        def __contains__(self, plan: object) -> bool:
            return False

    def keys(waits: bool, in_flight: set[int]) -> np.ndarray:
        """Layer 0's key cache after both."""
        with open_engine(make()) as engine:
            engine._in_flight = in_flight
            builder = Scenario(engine, None)._builder  # type: ignore[arg-type]
            for slot, token in ((0, 5), (1, 9)):
                builder.clear()
                builder.add(slot, np.full(96, token, np.int32), 0, 7, 7)
                engine.run_segment(builder.build(), 0)
                if waits:
                    engine._synchronize()
            cache = np.zeros(4 * 2 * 96 * 16, np.float32)
            engine._device.download(cache, engine._memory.address("k_cache_0", 0), engine._partition.stream)
            engine._synchronize()
            return cache

    expected = keys(True, set())
    assert expected.any()
    np.testing.assert_array_equal(keys(False, set()), expected)
    assert (keys(False, Forgetful()) != expected).any()


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
        hidden = hidden_rows(engine, len(kept), config.hidden_size)
    norm = weights.float32("model.norm.weight", (config.hidden_size,))
    head = weights.float32("lm_head.weight", (320, config.hidden_size))
    expected = early_exit_reference(hidden[[0, 2, 3, 5]], norm, head, candidates, config.rms_norm_eps)
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE)


def hidden_rows(engine: TensorRTEngine, num_rows: int, hidden_size: int) -> np.ndarray:
    """The current hidden rows in the caller's order."""
    raw = np.zeros((num_rows, hidden_size), np.float32)
    engine._device.download(raw, engine._memory.address("hidden_in", engine._read), engine._partition.stream)
    engine._synchronize()
    assert engine._network_row is not None
    return raw[engine._network_row]


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
    stand_in.device.compute_capability = capability
    with pytest.raises(EngineFileError, match="rebuild it") as caught:
        open_engine(stand_in)
    assert message in str(caught.value)
    assert not stand_in.device.memory
    assert not stand_in.device.host


def test_a_portable_engine_is_for_the_runtime_to_refuse(make: Callable[..., StandIn]) -> None:
    needs = Requirements("tensorrt_rtx", VERSION, ("8.0", "12.0"), True)
    stand_in = make(requirements=needs)
    stand_in.device.compute_capability = "9.0"
    open_engine(stand_in).close()
    stand_in.trt.validity = (
        trt.EngineValidity.INVALID,
        int(trt.EngineInvalidityDiagnostics.UNSUPPORTED_CC) | int(trt.EngineInvalidityDiagnostics.OLD_CUDA_DRIVER),
    )
    with pytest.raises(EngineFileError, match=r"does not run on this GPU \(.*UNSUPPORTED_CC.*\)") as caught:
        open_engine(stand_in)
    assert "OLD_CUDA_DRIVER" in str(caught.value)
    assert "VERSION_MISMATCH" not in str(caught.value)
    assert not stand_in.device.memory


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
    with pytest.raises(EngineFileError, match=r"other inputs and outputs than the table says \(surprise\)"):
        open_engine(stand_in)
    stand_in.trt.extra_tensor = ""
    stand_in.trt.interpreters = {}
    with pytest.raises(EngineFileError, match="cannot be deserialised"):
        open_engine(stand_in)
    assert not stand_in.device.memory
    assert not stand_in.device.host


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_len": 97}, "max_seq_len is 97, .* was built for 1 to 96"),
        ({"max_batch_size": 5}, "max_batch_size is 5"),
        ({"max_num_tokens": 0}, "max_num_tokens is 0"),
        ({"num_blocks": 5}, "num_blocks is 5, the linear caches of .* are 4 blocks"),
    ],
)
def test_limits_beyond_the_build_are_refused(
    make: Callable[..., StandIn], changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_engine(make(), **changes)


def test_what_is_closed_first(make: Callable[..., StandIn], reference: ReferenceModel) -> None:
    """Graphs, contexts, engines, runtime, memory; and nothing is left."""
    stand_in = make()
    device = stand_in.device
    engine = open_engine(stand_in)
    for seed in range(2):
        Scenario(engine, reference, seed).worst_error(RAGGED[:3])
    device.log.clear()
    engine.close()
    gc.collect()
    kinds = ["graph", "context", "engine", "runtime", "free"]
    assert device.log == sorted(device.log, key=kinds.index)
    assert set(device.log) == set(kinds)
    assert not device.memory
    assert not device.host
    assert not device.graphs
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
        assert {c._profile: c.config.dynamic_shapes_kernel_specialization_strategy for c in contexts} == {
            0: kinds.EAGER,
            1: kinds.NONE,
        }
        del contexts


def test_a_partition_has_contexts_and_graphs_of_its_own(
    make: Callable[..., StandIn], reference: ReferenceModel
) -> None:
    stand_in = make()
    device = stand_in.device
    whole, part = (GpuPartition(name, device.create_stream()) for name in ("whole", "part"))
    with open_engine(stand_in, partition=whole) as engine:
        scenario = Scenario(engine, reference)
        step = (Rows(0, 1), Rows(1, 1))
        for partition in (whole, whole, whole, part, part, part):
            engine.use(partition)
            assert scenario.worst_error([step]) < TOLERANCE
            device.log.append(partition.name)
        assert len(engine._graphs) == 2 * (len(SEGMENTS) - 1)
        assert {key[2] for key in engine._graphs} == {"whole", "part"}
        assert len(stand_in.trt.contexts) == 2 * (len(SEGMENTS) - 1)


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
def engine(make: Callable[..., StandIn]) -> Iterator[TensorRTEngine]:
    with open_engine(make(), max_logit_rows=8) as opened:
        yield opened


def test_bad_passes_are_named(engine: TensorRTEngine) -> None:
    scenario = Scenario(engine, None)  # type: ignore[arg-type]
    builder = scenario._builder
    builder.clear()
    with pytest.raises(InvalidArgumentError, match="there are no hidden rows"):
        engine.compact_rows(np.zeros(1, np.int32))
    builder.add(0, np.zeros(96, np.int32), 0, 12, 12)
    with pytest.raises(InvalidArgumentError, match="logits of 12 rows, the engine was opened for 8"):
        engine.forward(builder.build())
    with pytest.raises(InvalidArgumentError, match="rows is \\[3, 3\\], it must list rows 0 to 11 ascending"):
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


def test_the_executor_runs_on_it(make: Callable[..., StandIn], model: Any, reference: ReferenceModel) -> None:
    """A model that drafts for itself, with every mode and pruning at random: the tokens are the reference's argmax."""
    prompts = [np.random.default_rng(seed).integers(2, 320, 3 + seed).tolist() for seed in range(6)]
    collector, clock = Collector(), ManualClock()
    stand_ins = make(), make()
    with open_engine(stand_ins[0]) as target, open_engine(stand_ins[1]) as draft:
        policy = ErraticPolicy(3, seed=1)
        executor = assemble(target, draft, policy, ExecutorConfig(), max_seq_len=96, max_draft_len=3, clock=clock)
        with executor:
            for index, prompt in enumerate(prompts):
                params = SamplingParams(max_tokens=6, temperature=0.0)
                executor.submit(str(index), prompt, params, collector.sink(str(index)))
            while executor.step():
                clock.advance(0.001)
    accepted = sum(request.stats.num_accepted_tokens for request in collector.requests.values())
    assert accepted > len(prompts)
    for index, prompt in enumerate(prompts):
        tokens = collector.tokens[str(index)]
        logits = reference.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == tokens


def test_the_stand_in_has_the_devices_methods() -> None:
    def signatures(kind: type) -> dict[str, list[str]]:
        members = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(member).parameters) for name, member in members if name[0] != "_"}

    theirs = signatures(Device)
    mine = {name: parameters for name, parameters in signatures(StandInDevice).items() if name not in EXTRA}
    assert mine == theirs
