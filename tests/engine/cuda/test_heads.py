"""Draft heads under the whole executor on the cuda engine: the text is the target's own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from faser_trtllm.builder.cuda_engine_file import CudaFile
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import Quantization
from faser_trtllm.engine.cuda.engine import load_weights
from faser_trtllm.engine.cuda.memory import weight_bytes
from faser_trtllm.engine.cuda.open import open_cuda_engines
from faser_trtllm.engine.opening import OpenRequest, open_draft
from faser_trtllm.errors import ConfigError
from tests.engine.cuda.harness import HEADS, WHOLE, build_with_head
from tests.engine.cuda.heads import NUM_LAYERS, draft, open_pair, random_tokens
from tests.engine.cuda.host_executor import HostGpu, generate, repeating_requests
from tests.support.effort import pick

pytestmark = pytest.mark.slow

POLICIES = [
    *pick([], ["fixed:1", "price:prune=on", "fixed:3:ping_pong", "price:mode=ping_pong,prune=on"]),
    "fixed:4",
    "fixed:3:draft_ahead",
    "erratic",
]


@pytest.fixture(scope="module", params=HEADS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engines(kind: str, tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build_with_head(tmp_path_factory.mktemp(kind), exit_layers=(2,), **HEADS[kind])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_text_is_the_targets_own(engines: EngineDir, alone, policy: str) -> None:
    requests, expected = alone
    tokens, found = generate(engines, policy, requests)
    assert tokens == expected
    assert found["num_drafts"] > 0 or policy.startswith("price")
    if policy == "erratic":
        assert found["num_pruned_rows"] > 0


def test_a_head_goes_on_behind_the_text_s_drafts(engines: EngineDir) -> None:
    requests = repeating_requests()
    expected, _ = generate(engines, "off", requests, max_batch_size=1, max_num_tokens=128)
    for policy in ("erratic", *pick([], ["fixed:4", "fixed:3:draft_ahead", "price:prune=on"])):
        tokens, found = generate(engines, policy, requests, drafters="suffix,model")
        assert tokens == expected
        assert min(found[f"num_tested_drafts_{name}"] for name in ("suffix", "model")) > 0


def test_graphs_change_no_bit_and_hold_every_step(engines: EngineDir) -> None:
    """Pending drafts included: of a draft call only the first pass may be launched kernel by kernel."""
    tokens = random_tokens(7, 9, 20, 17)
    num_pending = (0, 0, 0) if engines.draft_head == "block" else (0, 2, 1)
    requests = [(t, len(t) - n, 0, wanted) for t, n, wanted in zip(tokens, num_pending, (3, 2, 3), strict=True)]
    found = []
    for captures in (False, True):
        with ExitStack() as stack:
            pair = open_pair(engines, stack, None)
            if captures:
                pair.draft.capture_graphs([WHOLE])
            pair.target.run([(slot, t, 0, len(t) - 1) for slot, t in enumerate(tokens)])
            drafted = draft(pair, requests)
            found.append([(result, q.tobytes()) for result, q in drafted])
            assert (("step", 4, WHOLE.name) in pair.draft.graphs) is captures
    assert found[0] == found[1]


def test_what_a_head_cannot_do_is_refused(kind: str, engines: EngineDir) -> None:
    says = {
        "eagle3": "an EAGLE-3 head, which runs",
        "eagle31": "an EAGLE-3 head, which runs",
        "medusa": "Medusa heads, which run",
        "mtp": "an MTP layer, which runs",
    }.get(kind, "a block drafter, which runs")
    request, gpu = OpenRequest(engines, engines.build_config, 16, drafting=True), HostGpu()
    with ExitStack() as stack:
        with pytest.raises(ConfigError, match=f"quantization is fp8, but .* drafts with {says} in the dtype"):
            open_cuda_engines(replace(request, quantization=Quantization.FP8), gpu, stack)
        with pytest.raises(ConfigError, match="reads hidden rows of a target of ours"):
            open_draft(request, stack)


def test_weights_are_counted_to_the_byte(kind: str, engines: EngineDir) -> None:
    """The count includes all that is loaded, but rope_inv_freq instead of the two tables made from it."""
    with CudaFile.open(engines.draft_path) as file:
        loaded, sizes = load_weights(file, torch.device("cpu")).num_bytes, file.model
    num_positions = sizes["max_seq_len"] + sizes.get("block", {"block_size": 1})["block_size"] - 1
    rotations = 2 * 4 * num_positions * sizes["head_dim"] // 2 - 4 * sizes["head_dim"] // 2
    counted = weight_bytes(engines.draft_path, Quantization.NONE)
    assert counted == loaded - (0 if kind == "medusa" else rotations)


def test_hidden_rows_are_counted_with_the_kv(kind: str, engines: EngineDir) -> None:
    """A KV token takes keys and values of all layers of both models, and hidden rows, each number in 2 bytes."""
    num_layers = NUM_LAYERS + {"eagle3": 1, "medusa": 0, "mtp": 1}.get(kind, 2)
    num_rows = len(HEADS[kind].get("layers", (0,)))
    assert engines.kv_bytes_per_token() == 2 * (num_layers * 2 * 2 * 64 + num_rows * 64)
