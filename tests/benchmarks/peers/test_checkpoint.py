"""The checkpoint that peers get has the weights that our engine gets."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.checkpoint import write_checkpoint
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.expand import ExpandedWeights, expand_config
from faser_trtllm.models.weights import CheckpointWeights, check_shapes, expected_shapes
from tests.support.checkpoints import make_checkpoint


@pytest.mark.parametrize("tie", [False, True])
def test_enlarged_checkpoint_has_the_same_function(tmp_path: Path, tie: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = make_checkpoint(tmp_path / "source", tie=tie)
    config = expand_config(load_model_config(source), 3)
    with CheckpointWeights(source) as weights:
        write_checkpoint(tmp_path / "large", source, config, ExpandedWeights(weights, 3))
    small, large = (
        transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        for directory in (source, tmp_path / "large")
    )
    assert len(large.model.layers) == 3 * len(small.model.layers)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(small(ids).logits, large(ids).logits)


def test_our_own_loader_reads_it(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", sharded=True)
    config = load_model_config(source)
    with CheckpointWeights(source) as weights:
        write_checkpoint(tmp_path / "copy", source, config, weights)
        assert load_model_config(tmp_path / "copy") == config
        with CheckpointWeights(tmp_path / "copy") as copy:
            check_shapes(copy, expected_shapes(config))
            for name in copy:
                shape = copy.shape(name)
                np.testing.assert_array_equal(copy.bfloat16(name, shape), weights.bfloat16(name, shape))
