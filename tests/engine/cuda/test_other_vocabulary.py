"""A draft model with another tokenizer on the cuda engine, on the host: its laws, and the text is the target's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.cuda_engine_file import CudaFile
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.errors import EngineFileError
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.models.vocabulary import map_vocabulary
from faser_trtllm.models.weights import CheckpointWeights
from tests.engine.cuda.harness import open_engine
from tests.engine.cuda.host_executor import KernelAcceptGpu, generate, mixed_requests
from tests.support.checkpoints import make_pair
from tests.support.effort import pick
from tests.support.engine_harness import Harness
from tests.support.vocabularies import make_foreign

pytestmark = pytest.mark.slow

VOCAB, NUM_DROPPED = 300, 25


@pytest.fixture(scope="module", params=pick([False], [False, True]), ids=lambda tie: "tied" if tie else "own_head")
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    """A pair whose checkpoints are in checkpoints/target and checkpoints/foreign."""
    root = tmp_path_factory.mktemp("foreign")
    sizes = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    target, draft = make_pair(root / "checkpoints", VOCAB, tie=request.param, **sizes)
    draft = make_foreign(draft, root / "checkpoints" / "foreign", NUM_DROPPED)
    options = BuildOptions(target, draft, root / "engines", backend="cuda", exit_layers=(1,), max_seq_len=256)
    engines = build_engines(options)
    assert engines is not None
    return engines


def test_laws_are_the_drafts_own_on_the_common_tokens(foreign: EngineDir) -> None:
    """Torch's for the draft's checkpoint by its own ids, and -inf for the others."""
    target, draft = (foreign.path.parent / "checkpoints" / name for name in ("target", "foreign"))
    found = map_vocabulary(Tokenizer.load(target), VOCAB, Tokenizer.load(draft), VOCAB)
    assert found is not None
    assert len(found.target_ids) == VOCAB - NUM_DROPPED
    own_ids = dict(zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True))
    tokens = np.random.default_rng(1).choice(found.target_ids, 40).tolist()
    with CheckpointWeights(draft) as weights:
        own = ReferenceModel(load_model_config(draft), weights).logits([own_ids[token] for token in tokens]).numpy()
    with open_engine(foreign.draft_path, max_draft_len=4) as engine:
        (mapped,) = Harness(engine).run([(0, tokens, 0, 40)])
    np.testing.assert_allclose(mapped[:, found.target_ids], own[:, found.draft_ids], rtol=1e-4, atol=1e-4)
    assert np.isneginf(np.delete(mapped, found.target_ids, 1)).all()


@pytest.mark.parametrize("policy", ["fixed:4", "erratic", *pick([], ["fixed:3:draft_ahead", "price:prune=on"])])
def test_the_text_is_the_targets_own(foreign: EngineDir, policy: str) -> None:
    requests = mixed_requests(True)
    alone, _ = generate(foreign, "off", requests, max_batch_size=1, max_num_tokens=128)
    for gpu in (None, *([KernelAcceptGpu()] if policy == "erratic" else [])):
        found, stats = generate(foreign, policy, requests, gpu)
        assert found == alone
        assert 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]


@pytest.mark.parametrize("wrong", [[3, 3], [-1, 2], [5, 4]])
def test_a_file_whose_map_is_wrong_is_refused(foreign: EngineDir, tmp_path: Path, wrong: list[int]) -> None:
    data = bytearray(foreign.draft_path.read_bytes())
    with CudaFile.open(foreign.draft_path) as file:
        ids, _ = file.array("output_ids")
        first = data.index(ids.tobytes())
    data[first : first + 16] = np.array(wrong, np.int64).tobytes()
    path = tmp_path / "rank0.engine"
    path.write_bytes(data)
    with pytest.raises(EngineFileError, match="output_ids do not rise from 0 to 299"):
        CudaFile.open(path)
