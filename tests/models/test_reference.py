from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.expand import ExpandedWeights, expand_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights, expected_shapes
from tests.support.checkpoints import LLAMA3_ROPE, YARN_ROPE, make_checkpoint
from tests.support.mtp import make_mimo

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope": {"rope_type": "linear", "factor": 2.0}}),
    "llama3": ("llama", {"rope": LLAMA3_ROPE, "spelling": "v4"}),
    "llama-yarn": ("llama", {"rope": YARN_ROPE, "tie": True}),
    "llama-float16": ("llama", {"dtype": "float16", "sharded": True}),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 24}),
    "qwen2": ("qwen2", {"spelling": "v4"}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "qwen2-upper-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3-windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32, "tie": True, "num_kv_heads": 1}),
}


def check_logits(directory: Path, transformers_class: Any) -> None:
    token_ids = torch.randint(0, 320, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    theirs = transformers_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    with CheckpointWeights(directory) as weights:
        logits = ReferenceModel(load_model_config(directory), weights).logits(token_ids)
    assert expected.std() > 1
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM  # here, since every worker collects this file

    architecture, options = CASES[case]
    check_logits(make_checkpoint(tmp_path, architecture, **options), AutoModelForCausalLM)


def test_mimo_is_qwen2(tmp_path: Path) -> None:
    """But for its MTP layer, which no logits of the target hang on."""
    from transformers import Qwen2ForCausalLM

    check_logits(make_mimo(tmp_path, head_dim=24), Qwen2ForCausalLM)


@pytest.mark.parametrize("expand", [1, 3])
def test_expansion_preserves_the_function(tmp_path: Path, expand: int) -> None:
    directory = make_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    config = load_model_config(directory)
    deeper = expand_config(config, expand)
    assert deeper.num_layers == 2 * expand
    with CheckpointWeights(directory) as weights:
        expanded = ExpandedWeights(weights, expand)
        before = ReferenceModel(config, weights).logits(range(5, 25))
        after = ReferenceModel(deeper, expanded).logits(range(5, 25))
        shapes = expected_shapes(deeper)
        nonzero = {name for name, shape in shapes.items() if len(shape) == 2 and expanded.bfloat16(name, shape).any()}
    assert torch.equal(before, after)
    # The added layers still cost what a layer costs, except that their outputs are zero.
    outputs = {name for name in shapes if name.endswith(("o_proj.weight", "down_proj.weight"))}
    assert len(outputs & nonzero) == 4
    assert {name for name, shape in shapes.items() if len(shape) == 2} - outputs <= nonzero
