"""A draft model with another tokenizer than its target: it drafts by its own law on the tokens that both have, and
changes no text."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_file import EngineFile
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.errors import CheckpointError, EngineFileError, InvalidArgumentError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.models.vocabulary import VocabularyMap, map_vocabulary
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.profiling import profile
from faser_trtllm.profiling.ensure import measure_once
from faser_trtllm.profiling.prompts import draw_prompts
from tests.support.checkpoints import make_checkpoint, make_pair
from tests.support.effort import pick
from tests.support.engine_harness import Harness
from tests.support.executor_harness import Collector
from tests.support.vocabularies import make_foreign

DEMO = Path(__file__).parents[2] / "engines" / "demo"
SIZES = {"max_seq_len": 96, "max_batch_size": 3, "max_num_tokens": 64, "max_draft_len": 5}
VOCAB, NUM_DROPPED = 320, 30
# The last of the target's tokens are those that the draft lacks.
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(285, 320)), [9, 9, 9], [4, 310, 15, 4, 8], [1, 1, 1]]
SAMPLING = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"repetition_penalty": 1.2},
    {"temperature": 1.2, "seed": 4},
    {"temperature": 0.7, "seed": 5, "top_k": 20},
]


def map_of(target: Path, draft: Path) -> VocabularyMap:
    found = map_vocabulary(Tokenizer.load(target), VOCAB, Tokenizer.load(draft), VOCAB)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """target, and its first layers with another vocabulary, through the right map and one that is off by one."""
    root = tmp_path_factory.mktemp("checkpoints")
    target, related = make_pair(root, VOCAB, num_layers=2)
    tied = make_checkpoint(root / "of_tied", vocab_size=VOCAB, num_layers=1, tie=True)
    return {
        "target": target,
        "draft": make_foreign(related, root / "foreign", NUM_DROPPED),
        "wrong": make_foreign(related, root / "wrong", NUM_DROPPED, shift=1),
        "tied": make_foreign(tied, root / "tied", NUM_DROPPED),
    }


def options(checkpoints: dict[str, Path], output: Path, draft: str = "draft", **more) -> BuildOptions:
    return BuildOptions(checkpoints["target"], checkpoints[draft], output, **(SIZES | more))


@pytest.fixture(scope="module")
def engines(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("engines")
    built = {name: options(checkpoints, root / name, name) for name in ("draft", "wrong", "tied")}
    built["int8"] = replace(built["tied"], output_dir=root / "int8", draft_quantization="int8", quantize_lm_head=True)
    paths = {name: build_engines(each).path for name, each in built.items()}
    with mock.patch.object(profile, "QUICK_BUDGET_S", 0.05):
        for path in paths.values():
            measure_once(path, num_threads=1)  # for `price`
    return paths


def texts(engine_dir: Path, **config):
    """Return tokens of all prompts at once, stats."""
    collector = Collector()
    with open_executor(engine_dir, ExecutorConfig(num_threads=1, **config)) as executor:
        for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
            params = SamplingParams(max_tokens=50, **sampling)
            executor.submit(str(index), prompt, params, collector.sink(str(index)))
        while executor.step():
            executor.check_integrity()
        return collector.tokens, executor.stats()


@pytest.fixture(scope="module")
def plain(engines: dict[str, Path]):
    return texts(engines["draft"], speculation="off")[0]


@pytest.mark.parametrize("draft", ["draft", "tied", "int8", "wrong"])
@pytest.mark.parametrize("speculation", pick(["fixed:5", "fixed:3,mode=draft_ahead"], ["fixed:1", "price"]))
def test_the_text_is_the_targets_own(engines: dict[str, Path], plain, draft: str, speculation: str) -> None:
    """Greedy and seeded, with prompts of tokens that the draft lacks, whatever the map is."""
    found, stats = texts(engines[draft], speculation=speculation)
    assert found == plain
    assert stats["num_tested_drafts_model"] > 0


@pytest.mark.parametrize("num_branches", [0, 2])
def test_a_map_that_is_off_by_one_only_costs_drafts(engines: dict[str, Path], num_branches: int) -> None:
    kept = {}
    for name in ("draft", "wrong"):
        _, stats = texts(engines[name], speculation="fixed:1", num_branches=num_branches)
        kept[name] = stats["num_accepted_tokens"] / stats["num_tested_drafts_model"]
    assert kept["draft"] > 2 * kept["wrong"]


@pytest.mark.parametrize("name", ["draft", "tied"])
def test_laws_are_the_drafts_own_on_the_common_tokens(
    checkpoints: dict[str, Path], engines: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Bit for bit those of the draft's checkpoint alone, by its own ids; -inf for the others."""
    found = map_of(checkpoints["target"], checkpoints[name])
    assert len(found.target_ids) == VOCAB - NUM_DROPPED
    assert (found.target_ids != found.draft_ids).any()
    alone = build_engines(BuildOptions(checkpoints[name], None, tmp_path / "alone", **SIZES))
    draft_of = dict(zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True))
    tokens = np.random.default_rng(1).choice(found.target_ids, 40).tolist()
    sizes = {"num_blocks": 12, "tokens_per_block": 32, "max_batch_size": 3, "max_num_tokens": 64}
    with ExitStack() as stack:
        cores = stack.enter_context(CoreSet(num_threads=2))
        logits = []
        for path, ids in (
            (engines[name] / "draft" / "rank0.engine", tokens),
            (alone.target_path, [draft_of[token] for token in tokens]),
        ):
            harness = Harness(stack.enter_context(CpuEngine.open(path, cores, **sizes)))
            logits.append(np.concatenate([harness.run([(0, ids, *rows)])[0] for rows in ((0, 25), (25, 40))]))
    mapped, own = logits
    assert np.array_equal(mapped[:, found.target_ids], own[:, found.draft_ids])
    others = np.setdiff1d(np.arange(VOCAB), found.target_ids)
    assert np.isneginf(mapped[:, others]).all()


def test_the_build_says_how_many_tokens_are_common(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    notes: list[str] = []
    given = options(checkpoints, tmp_path / "e")
    engines = build_engines(given, note=notes.append)
    assert "draft: its tokenizer differs; it drafts only 90.62 % of the target's tokens (290 of 320)" in notes[0]
    assert engines is not None
    assert engines.vocab_size == VOCAB
    with EngineFile.open(engines.draft_path) as file:
        assert file.header["model"]["num_outputs"] == 290
    before = engines.draft_path.stat().st_ino
    assert build_engines(given).draft_path.stat().st_ino == before


def test_too_few_common_tokens_are_refused_with_their_number(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoints = checkpoints | {"few": make_foreign(checkpoints["target"], tmp_path / "few", 100)}
    given = options(checkpoints, tmp_path / "e", "few")
    message = (
        r"different tokenizers \(id 0 is .*, and the draft has 68.75 % of the target's tokens \(220 of 320\), "
        "min_vocab_overlap is 90 %; take a draft with the target's tokenizer, or set a lower --min_vocab_overlap"
    )
    with pytest.raises(CheckpointError, match=message):
        build_engines(given)
    build_engines(replace(given, min_vocab_overlap=0.5))
    with pytest.raises(CheckpointError, match=r"90.62 % .*, min_vocab_overlap is 95 %"):
        build_engines(replace(options(checkpoints, tmp_path / "f"), min_vocab_overlap=0.95))
    with pytest.raises(InvalidArgumentError, match="min_vocab_overlap is 0; it must be above 0 and at most 1"):
        build_engines(replace(given, min_vocab_overlap=0.0))


def test_backends_without_maps_refuse(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    message = "only cpu or cuda engines translate between two tokenizers, not those of tensorrt_rtx; use --backend cpu"
    with pytest.raises(InvalidArgumentError, match=message):
        build_engines(options(checkpoints, tmp_path / "e", backend="tensorrt_rtx"))


@pytest.mark.parametrize("ids", [[3, 3, 5], [-1, 3, 5], [3, 2, 5], [1, 2, VOCAB]])
def test_an_engine_file_whose_map_is_wrong_is_refused(engines: dict[str, Path], tmp_path: Path, ids: list[int]) -> None:
    path = tmp_path / "rank0.engine"
    path.write_bytes((engines["draft"] / "draft" / "rank0.engine").read_bytes())
    with EngineFile.open(path) as file:
        offset = file.header["tensors"]["output_ids"]["offset"]
        whole = file.array("output_ids", np.int32).copy()
    whole[[0, 1, -1]] = ids
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(whole.tobytes())
    sizes = {"num_blocks": 12, "tokens_per_block": 32, "max_batch_size": 3, "max_num_tokens": 64}
    with (
        CoreSet(num_threads=1) as cores,
        pytest.raises(EngineFileError, match=r"output_ids are ascending, .*; rebuild it"),
    ):
        CpuEngine.open(path, cores, **sizes)


def test_the_demos_target_keeps_the_drafts_of_a_foreign_draft_model(tmp_path: Path) -> None:
    """The demo's draft model without 300 of its 4096 tokens, and with the rows of other tokens."""
    prompts = draw_prompts(Tokenizer.load(DEMO / "target").encode, 8, 64).token_ids
    kept, found = {}, {}
    drafts = {
        "own": DEMO / "draft",
        "foreign": make_foreign(DEMO / "draft", tmp_path / "foreign", 300),
        "wrong": make_foreign(DEMO / "draft", tmp_path / "wrong", 300, shift=1),
    }
    for name, draft in drafts.items():
        built = build_engines(BuildOptions(DEMO / "target", draft, tmp_path / "e" / name, max_seq_len=256))
        collector = Collector()
        with open_executor(built.path, ExecutorConfig(num_threads=1, speculation="fixed:1")) as executor:
            for index, prompt in enumerate(prompts):
                executor.submit(str(index), prompt, SamplingParams(max_tokens=64), collector.sink(str(index)))
            while executor.step():
                pass
            stats = executor.stats()
        found[name] = collector.tokens
        kept[name] = stats["num_accepted_tokens"] / stats["num_tested_drafts_model"]
    assert found["own"] == found["foreign"] == found["wrong"]
    assert kept["wrong"] < 0.2 < 0.7 * kept["own"] < kept["foreign"]
