"""The cuda engine on the host: parity with the torch reference, buckets, graphs, segments, drafting, and its files."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu.dry_gpu import HostRuntime
from benchmarks.gpu.reference_ops import ReferenceOps
from faser_trtllm.builder.cuda_engine_file import CudaFile
from faser_trtllm.builder.engine_file import EngineFile
from faser_trtllm.core.batch import keep_rows
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.engine.gpu.graphs import GraphStore
from faser_trtllm.engine.gpu.ops import STEMS, Ops
from faser_trtllm.engine.gpu.runtime import CudaRuntime
from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs
from faser_trtllm.errors import ConfigError, EngineFileError, FaserError, InvalidArgumentError
from faser_trtllm.partition.green_context import GpuPartition
from faser_trtllm.serving.launch.check import check_engine_dir
from lab.reference.early_exit import early_exit_reference
from lab.reference.sample import MAX_STORED_MARGIN
from tests.engine.cuda.drafting import Drafting, assert_same_drafts
from tests.engine.cuda.exact_ops import ExactOps
from tests.engine.cuda.harness import (
    MAX_BATCH_SIZE,
    WHOLE,
    build_pair,
    emulated_rows,
    open_engine,
    random_tokens,
    reference_logits,
)
from tests.ops.cuda.emulation import emulated
from tests.support.effort import ONLY_ALL
from tests.support.engine_harness import Harness

FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie": True},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    return build_pair(tmp_path_factory.mktemp("pair"), exit_layers=(1, 2))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_ragged_passes_compute_what_the_reference_does(tmp_path: Path, architecture: str) -> None:
    engines = build_pair(tmp_path, architecture=architecture, **FAMILIES[architecture])
    first, second = random_tokens(70), random_tokens(40, 1)
    wanted = [reference_logits(engines, "target", tokens) for tokens in (first, second)]
    with open_engine(engines.target_path) as engine:
        harness = Harness(engine)
        passes = [
            [(2, first, 0, 33)],
            [(2, first, 33, 70), (0, second, 0, 5)],
            [(0, second, 5, 6)],
            [(0, second, 6, 40), (2, first, 64, 70)],  # rows again, as after a rejected draft
        ]
        for rows in passes:
            for (slot, _, begin, end), logits in zip(rows, harness.run(rows), strict=True):
                expected = wanted[0 if slot == 2 else 1][begin:end]
                np.testing.assert_allclose(logits, expected, atol=2e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_the_reference(tmp_path: Path, dtype: str) -> None:
    engines = build_pair(tmp_path, dtype=dtype)
    tokens = random_tokens(50)
    wanted = reference_logits(engines, "target", tokens)
    with open_engine(engines.target_path, ReferenceOps(), getattr(torch, dtype)) as engine:
        found = Harness(engine).run([(1, tokens, 0, 50)])[0]
    tolerance = 0.1 if dtype == "bfloat16" else 0.02
    assert np.abs(found - wanted).max() < tolerance * wanted.std()


def test_buckets_and_graphs_change_no_bit(pair) -> None:
    tokens, other = random_tokens(60), random_tokens(60, 1)
    batches = [[(0, tokens, 0, n), (3, other, 0, 1)] for n in (1, 2, 3, 7, 16, 33, 60)]
    narrow = [[(slot, tokens, 20, 21) for slot in range(count)] for count in range(1, MAX_BATCH_SIZE + 1)]
    with open_engine(pair.target_path) as engine:
        plain = [Harness(engine).run(rows) for rows in (*batches, *narrow)]
    with open_engine(pair.target_path) as engine:
        harness = Harness(engine)
        assert engine.capture_graphs([WHOLE]) == 0
        num_graphs = len(engine.graphs)
        assert num_graphs > 40
        for rows, expected in zip((*batches, *narrow), plain, strict=True):
            for found, want in zip(harness.run(rows), expected, strict=True):
                np.testing.assert_array_equal(found, want)
        assert len(engine.graphs) == num_graphs, "nothing is captured while serving"


def test_graphs_are_replayed_only_on_their_partition(pair) -> None:
    replayed = []

    class Watched(HostRuntime):
        def capture(self, work):
            partition = engine.partition.name
            return lambda: (replayed.append(partition), work())

    other = GpuPartition("target 32:100", 7, 100)
    with open_engine(pair.target_path, runtime=Watched()) as engine:
        engine.capture_graphs([WHOLE, other])
        harness = Harness(engine)
        harness.run([(0, [1, 2, 3], 0, 3)])
        engine.use(other)
        harness.run([(0, [1, 2, 3], 0, 3)])
        engine.use(GpuPartition("never captured", 8, 8))
        harness.run([(0, [1, 2, 3], 0, 3)])
    assert replayed == ["whole", "target 32:100"]


class Growing(HostRuntime):
    """Each graph takes 40 bytes."""

    num_bytes = 0

    def capture(self, work):
        self.num_bytes += 40
        return work

    def memory_bytes(self):
        return self.num_bytes


def test_the_budget_ends_capturing() -> None:
    ran: list[int] = []
    store = GraphStore(Growing(), budget_bytes=100)
    done = [store.capture(key, lambda key=key: ran.append(key)) for key in range(5)]
    assert done == [True, True, True, False, False]
    assert (len(store), store.num_bytes, store.num_left_out) == (3, 120, 2)
    assert ran == [0, 1, 2, 3, 4], "each is run once, captured or not"
    assert store.replay(1)
    assert not store.replay(3)
    assert ran[-1] == 1


def test_half_of_what_is_free_ends_capturing_too() -> None:
    class Small(Growing):
        def free_bytes(self):
            return 140 - self.num_bytes

    store = GraphStore(Small(), budget_bytes=1000)
    assert [store.capture(key, lambda: None) for key in range(4)] == [True, True, False, False]


class Refusing(HostRuntime):
    """A driver without conditional nodes."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.num_asked = error, 0

    def capture_loop(self, begin, step, going):
        self.num_asked += 1
        raise self.error


@pytest.mark.parametrize("error", [FaserError("cuGraphAddNode failed"), RuntimeError("cuGraphAddNode is not found")])
def test_a_driver_that_refuses_loops_is_asked_once_and_drafts_are_the_same(pair, error, caplog) -> None:
    wanted = [4, 1, 3, 0, 2]
    with open_engine(pair.draft_path, max_draft_len=4) as engine:
        engine.capture_graphs([WHOLE])
        drafted = Drafting(engine, 5).run(wanted)
        num_graphs = len(engine.graphs)
    runtime = Refusing(error)
    with open_engine(pair.draft_path, max_draft_len=4, runtime=runtime) as engine:
        assert engine.capture_graphs([WHOLE]) == 0
        assert Drafting(engine, 5).run(wanted) == drafted
        num_sizes = len(engine.graphs) - num_graphs
        assert num_sizes > 1, "a graph for the draw and one for the step in place of a loop"
    assert runtime.num_asked == 1
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith(f"loops in CUDA graphs cannot be made ({error}): with a stop rule the host reads one number")


def test_the_budget_ends_capturing_loops() -> None:
    """The graph that replaces a loop is left out as well; only that graph is counted."""
    going = torch.zeros(1, dtype=torch.int32)
    store = GraphStore(HostRuntime(), budget_bytes=0)
    assert not store.capture_loop("loop", lambda: None, lambda: None, going)
    assert not store.capture("draw", lambda: None)
    assert (len(store), store.num_left_out) == (0, 1)


def test_pruned_rows_leave_the_others_as_they_are(pair) -> None:
    tokens, other = random_tokens(30), random_tokens(30, 1)
    rows = [(0, tokens, 0, 9), (4, other, 0, 5), (1, tokens, 0, 1)]
    kept = np.array([0, 1, 2, 3, 9, 14], np.int32)
    with open_engine(pair.target_path) as engine:
        harness = Harness(engine)
        full = np.concatenate(harness.run(rows))
        harness = Harness(engine)
        engine.capture_graphs([WHOLE])
        for boundary in (1, 2):
            batch = harness.batch(rows)
            for segment in range(boundary):
                assert engine.run_segment(batch, segment) is None
            engine.compact_rows(kept)
            batch = keep_rows(batch, kept, [4, 1, 1])
            for segment in range(boundary, 3):
                logits = engine.run_segment(batch, segment)
            np.testing.assert_array_equal(logits[:], full[kept])
        after = harness.run([(0, tokens, 4, 9)])[0]  # the KV of dropped rows is written by the pass that runs them
        np.testing.assert_array_equal(after, full[4:9])


def test_early_exit_scores_candidates_from_hidden_rows(pair) -> None:
    tokens = random_tokens(12)
    rows = np.array([0, 5, 11], np.int32)
    candidates = np.array([[1, 2, -1], [300, 4, 5], [7, -1, -1]], np.int32)
    with open_engine(pair.target_path) as engine:
        batch = Harness(engine).batch([(0, tokens, 0, 12)])
        engine.run_segment(batch, 0)
        hidden = engine._decoder.hidden(0)[:12].numpy().copy()
        weights = engine._decoder.weights
        scores = engine.early_exit(rows, candidates)
        wanted = early_exit_reference(
            hidden[rows], weights.final_norm.numpy(), weights.lm_head.numpy(), candidates, weights.sizes["rms_norm_eps"]
        )
        np.testing.assert_allclose(scores, wanted, rtol=1e-5)
        assert engine.early_exit(rows[:0], candidates[:0]).shape == (0, 3)
        np.testing.assert_array_equal(engine._decoder.hidden(0)[:12].numpy(), hidden)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("wanted", [[4, 1, 3, 0, 2], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [4, 4, 4, 4, 4]])
def test_the_device_drafts_what_the_host_would(pair, wanted: list[int], captured: bool) -> None:
    with open_engine(pair.draft_path, max_draft_len=4) as engine:
        by_host = Drafting(engine, 5).run(wanted, by_host=True)
    with open_engine(pair.draft_path, max_draft_len=4) as engine:
        if captured:
            engine.capture_graphs([WHOLE])
        drafting = Drafting(engine, 5)
        assert_same_drafts(drafting.run(wanted), by_host)
        # The KV of all drafts but the newest is there: the next pass over them gives what a pass from scratch does.
        request, count = drafting.requests[0], wanted[0]
        if count > 1:
            n = request.num_tokens
            harness = Harness(engine)
            again = harness.run([(0, request.tokens, n + count - 1, n + count)])[0]
            scratch = harness.run([(0, request.tokens, 0, n + count)])[0][-1:]
            np.testing.assert_array_equal(again, scratch)


def test_drafts_begin_behind_those_of_the_text(pair) -> None:
    """Which the first pass runs along; with edits, too."""
    for edits in ({}, {"repetition_penalty": 1.4}):
        num_certain, wanted = (2, 0, 1, 3, 0), [2, 4, 3, 1, 0]
        with open_engine(pair.draft_path, max_draft_len=4) as engine:
            by_host = Drafting(engine, 5, num_certain=num_certain, **edits).run(wanted, by_host=True)
        with open_engine(pair.draft_path, max_draft_len=4) as engine:
            assert_same_drafts(Drafting(engine, 5, num_certain=num_certain, **edits).run(wanted), by_host)
        assert by_host[0] == wanted


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("num_certain", [(), (0, 1, 1, 2, 3)])
@pytest.mark.parametrize("step_price", [0.0, 1.2, 9.0])
def test_a_stop_rule_stops_where_it_stops_on_the_host(
    pair, step_price: float, num_certain: tuple[int, ...], captured: bool
) -> None:
    ones = np.ones((NUM_MODES, 4), np.float32)
    intercepts = np.array([[-0.5], [3.0], [0.0]], np.float32) * ones  # a seeded draft is trusted more than a greedy one
    stop = DraftStop(
        0.5 * ones,
        intercepts,
        0.7 * ones,
        0.2 * ones,
        0.2 * ones[0],
        np.full(MAX_BATCH_SIZE + 1, step_price, np.float32),
    )
    with open_engine(pair.draft_path, max_draft_len=4) as engine:
        wanted = [min(4 - (*num_certain, *[0] * 5)[i], count) for i, count in enumerate([4, 2, 4, 4, 4])]
        by_host = Drafting(engine, 5, num_certain=num_certain).run(wanted, by_host=True, stop=stop)
        full = Drafting(engine, 5).run([4, 4, 4, 4, 4], by_host=True)  # before it, so that more steps were drawn
    with open_engine(pair.draft_path, max_draft_len=4) as engine:
        if captured:
            engine.capture_graphs([WHOLE])
        assert_same_drafts(Drafting(engine, 5).run([4, 4, 4, 4, 4]), full)
        assert_same_drafts(Drafting(engine, 5, num_certain=num_certain).run(wanted, stop=stop), by_host)
    assert sum(by_host[0]) < sum(wanted), "the rule stops somebody, so this tests something"


EDITS = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 2.0, "frequency_penalty": 1.0},
    "bad words": {"bad_words": ((5,), (0, 1), (250, 7))},
    "bias": {"logit_bias": ((8, 9.0), (9, -2.0))},
    "least tokens": {"end_ids": tuple(range(160)), "min_tokens": 2},
}


@pytest.mark.parametrize("edits", EDITS)
def test_edited_logits_are_drafted_from_as_on_the_host(pair, edits: str) -> None:
    """Each drafted token counts as history of the next."""
    with open_engine(pair.draft_path, max_draft_len=4) as engine:
        plain = Drafting(engine, 5).run([4, 2, 4, 1, 3])
        by_host = Drafting(engine, 5, **EDITS[edits]).run([4, 2, 4, 1, 3], by_host=True)
    with open_engine(pair.draft_path, max_draft_len=4) as engine:
        engine.capture_graphs([WHOLE])
        assert_same_drafts(Drafting(engine, 5, **EDITS[edits]).run([4, 2, 4, 1, 3]), by_host)
        assert_same_drafts(Drafting(engine, 5).run([4, 2, 4, 1, 3]), plain)
    assert by_host != plain, "the edits change something"


def test_large_steps_have_logits_for_edits(pair) -> None:
    """Graphs of passes have them only up to max_graph_rows."""
    with open_engine(pair.draft_path, max_draft_len=4, max_graph_rows=2) as engine:
        engine.capture_graphs([WHOLE])
        by_host = Drafting(engine, 4, **EDITS["repetition"]).run([4, 4, 4, 4], by_host=True)
        assert_same_drafts(Drafting(engine, 4, **EDITS["repetition"]).run([4, 4, 4, 4]), by_host)


def test_unseeded_drafts_leave_the_distribution_they_were_drawn_from(pair) -> None:
    """Which is the host's, and so are the drafts: a call goes on where the numbers of the one before ended."""
    draft_probs = DeviceDraftProbs(HostRuntime(), WHOLE, MAX_BATCH_SIZE, 4, 320)
    with open_engine(pair.draft_path, max_draft_len=4) as engine:
        host = Drafting(engine, 3, sampled=(0, 2), top_k=20, top_p=0.9)
        by_host = [host.run([3, 2, 3], by_host=True) for _ in range(2)]
    assert by_host[0] != by_host[1], "another draw of the same rows"
    with open_engine(pair.draft_path, max_draft_len=4, draft_probs=draft_probs) as engine:
        drafting = Drafting(engine, 3, sampled=(0, 2), top_k=20, top_p=0.9)
        for wanted in by_host:
            assert_same_drafts(drafting.run([3, 2, 3]), wanted)
        n = drafting.requests[2].num_tokens
        for place in range(3):
            row = (n + place) % 4
            np.testing.assert_array_equal(draft_probs.tensor[2, row].numpy(), host.table.draft_probs.rows(2)[row])
        assert not draft_probs.tensor[1].any(), "a seeded request's drafts have no distribution to keep"


@pytest.fixture(scope="module")
def kernel_ops() -> Ops:
    launchers = {stem: emulated(stem) for stem in STEMS if stem not in ("accept", "sample", "verify_attention")}
    launchers["verify_attention"] = emulated("verify_attention", {"FASER_HEAD_DIM": 64})
    launchers |= {stem: emulated_rows(stem) for stem in ("accept", "sample")}
    return Ops(launchers, lambda: 0, num_sms=4)


@pytest.mark.parametrize(("params", "is_sure"), [({}, False), ({"min_p": 1.0}, True)])
def test_the_kernel_gives_the_margins_of_the_host(pair, params: dict[str, float], is_sure: bool) -> None:
    ops = ExactOps()
    launchers = {"sample": emulated_rows("sample"), "take_step": emulated("take_step")}
    kernels = Ops(launchers, lambda: 0, num_sms=4)
    for name in ("sample", "advance", "take_step"):
        setattr(ops, name, getattr(kernels, name))
    with open_engine(pair.draft_path, max_draft_len=4) as engine:
        by_host = Drafting(engine, 5, **params).run([2, 4, 1, 3, 0], by_host=True)
    with open_engine(pair.draft_path, ops, max_draft_len=4) as engine:
        assert_same_drafts(Drafting(engine, 5, **params).run([2, 4, 1, 3, 0]), by_host)
    assert [margin == MAX_STORED_MARGIN for margin in by_host[1][1][1]] == [is_sure] * 4


@ONLY_ALL
@pytest.mark.slow
def test_the_kernels_themselves_in_the_engine(pair, kernel_ops: Ops) -> None:
    """The very kernels, emulated, from the engine's launches: attention, KV, early exit, compaction, drafting."""
    tokens, other = random_tokens(24), random_tokens(24, 1)
    rows = [(0, tokens, 0, 9), (3, other, 0, 4)]
    kept = np.array([0, 1, 9], np.int32)
    candidates = np.array([[1, 2, -1], [7, 8, 9]], np.int32)
    found = []
    for ops in (ReferenceOps(), kernel_ops):
        with ExitStack() as stack:
            engine = stack.enter_context(open_engine(pair.target_path, ops, torch.bfloat16))
            harness = Harness(engine)
            logits = np.concatenate(harness.run(rows))
            batch = harness.batch(rows)
            engine.run_segment(batch, 0)
            scores = engine.early_exit(np.array([2, 10], np.int32), candidates)
            engine.compact_rows(kept)
            batch = keep_rows(batch, kept, [2, 1])
            pruned = [engine.run_segment(batch, segment) for segment in (1, 2)][1][:].copy()
            draft = stack.enter_context(open_engine(pair.draft_path, ops, torch.bfloat16, max_draft_len=4))
            drafted = Drafting(draft, 3).run([2, 1, 0])
            found.append((logits, scores, pruned, drafted))
    (logits, scores, pruned, drafted), emulated_results = found
    scale = logits.std()
    assert np.abs(emulated_results[0] - logits).max() < 0.05 * scale
    np.testing.assert_allclose(emulated_results[1], scores, atol=0.1)
    np.testing.assert_allclose(emulated_results[2], pruned, atol=0.05 * scale)
    np.testing.assert_allclose(emulated_results[2], emulated_results[0][kept], atol=0.05 * scale)
    assert emulated_results[3][0] == drafted[0] == [2, 1, 0]


def test_batches_that_cannot_be_are_refused(pair) -> None:
    with open_engine(pair.target_path, max_logit_rows=8) as engine:
        harness = Harness(engine)
        cases = [
            (lambda: harness.run([(0, [1, 320], 0, 2)]), "token_ids are not all within 0 to 319"),
            (lambda: harness.run([(0, random_tokens(97), 0, 97)]), "97"),
            (lambda: harness.run([(0, random_tokens(12), 0, 12)]), "logits of 12 rows, the engine was opened for 8"),
            (lambda: engine.run_segment(harness.batch([(0, [1], 0, 1)]), 3), "segment is 3, allowed is 0 to 2"),
            (lambda: engine.compact_rows(np.array([0], np.int32)), "there are no hidden rows"),
            (lambda: harness.run([(0, random_tokens(300), 256, 257)]), "positions reach from 256 to 256"),
        ]
        for call, message in cases:
            with pytest.raises((InvalidArgumentError, ValueError), match=message):
                call()
        batch = harness.batch([(0, [1, 2, 3], 0, 3)])
        engine.run_segment(batch, 0)
        with pytest.raises(InvalidArgumentError, match="ascending, each once"):
            engine.compact_rows(np.array([1, 0], np.int32))
        with pytest.raises(InvalidArgumentError, match="the batch has 1 rows, the segment before left 3"):
            engine.run_segment(harness.batch([(0, [1], 0, 1)]), 1)
        with pytest.raises(InvalidArgumentError, match="token id 320, the largest is 319"):
            engine.early_exit(np.array([0], np.int32), np.array([[320]], np.int32))
        wrong = dataclasses.replace(batch, block_table=np.full_like(batch.block_table, 999))
        with pytest.raises(InvalidArgumentError, match="block ids are not all within 0 to 47"):
            engine.forward(wrong)
        drafting = Drafting(engine, 1)
        with pytest.raises(ConfigError, match="max_draft_len is 4, the engine was opened for 0"):
            drafting.run([1])
    calls_when_closed = (
        lambda: engine.forward(batch),
        lambda: engine.run_segment(batch, 1),
        lambda: engine.compact_rows(np.array([0], np.int32)),
        lambda: engine.early_exit(np.array([0], np.int32), np.array([[1]], np.int32)),
        lambda: drafting.run([1]),
    )
    for call in calls_when_closed:
        with pytest.raises(ValueError, match="the engine is closed"):
            call()
    engine.close()
    with pytest.raises(ConfigError, match="max_seq_len is 257, the engine allows 1 to 256"):
        open_engine(pair.target_path, max_seq_len=257)


def test_files_that_are_not_cuda_engines_are_refused(pair, tmp_path: Path) -> None:
    good = pair.target_path.read_bytes()
    cases = {
        b"": "is not an engine of the cuda backend, or damaged",
        good[:-1]: "is not an engine of the cuda backend, or damaged",
        b"FASERENG" + bytes(4000): "is not an engine of the cuda backend, or damaged",
        good.replace(b'\\"version\\": 1', b'\\"version\\": 9'): "has version 9, this faser reads 1",
        good.replace(
            b'\\"hidden_size\\": 64', b'\\"hidden_size\\": 96'
        ): r"tensor .* is BF16 of shape \[.*\]; its header requires BF16 of \[.*\]; rebuild it",
    }
    for content, message in cases.items():
        path = tmp_path / "rank0.engine"
        path.write_bytes(content)
        with pytest.raises(EngineFileError, match=message):
            CudaFile.open(path)


def test_files_are_safetensors(pair) -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(pair.target_path, "pt") as file:
        assert file.get_tensor("layers.0.qkv").shape == (512, 64)
        assert file.get_tensor("layers.0.qkv").dtype == torch.bfloat16
    with CudaFile.open(pair.target_path) as file:
        assert file.segments == (0, 1, 2, 3)


def test_what_runs_on_cpu_engines_only_says_so(pair) -> None:
    with pytest.raises(EngineFileError, match=r"target/rank0\.engine is an engine of the cuda backend, and what was"):
        EngineFile.open(pair.target_path)


def test_faser_check_tells_what_a_directory_holds(pair) -> None:
    lines = list(check_engine_dir(pair.path))
    assert lines[2].startswith("target: bfloat16, 0 MiB, 3 layers in segments 0-1 1-2 2-3")
    assert lines[3].startswith("draft: bfloat16")
    assert "need an NVIDIA GPU" in lines[4]


def test_a_torch_that_is_too_old_is_named(monkeypatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu130")
    with pytest.raises(ConfigError, match=r"^torch 2\.10\.1\+cu130 is too old, GPU backends need 2\.11 or newer"):
        CudaRuntime()
