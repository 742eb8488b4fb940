"""EAGLE-3 checkpoints: published layouts mean the same, what is ambiguous is asked for, and errors are one sentence."""

import json
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.heads.eagle3 import LAYERS_KEY, Eagle3Weights, expected_shapes, is_eagle3, load_eagle3_config
from faser_trtllm.models.heads.torch_file import open_head_files
from faser_trtllm.models.weights import CheckpointWeights
from tests.support.checkpoints import make_checkpoint
from tests.support.eagle3 import make_head

VOCAB, NUM_LAYERS = 320, 4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, num_layers=NUM_LAYERS)


def read(head, target, layers=()):
    """-> config, {our name: fp32 tensor}, token ids."""
    with ExitStack() as stack, CheckpointWeights(target) as of_target:
        weights = Eagle3Weights(open_head_files(head, stack), of_target)
        config = load_eagle3_config(head, weights, load_model_config(target), layers)
        tensors = {name: weights.float32(name, shape) for name, shape in expected_shapes(config).items()}
        return config, tensors, weights.target_ids(config.draft_vocab_size, VOCAB)


@pytest.mark.parametrize(
    "layout",
    [
        {"naming": "layers.0"},
        {"naming": "layers.0", "prefix": "model."},
        {"architectures": ["LlamaForCausalLM"]},  # SafeAILab's: only draft_vocab_size tells
    ],
)
def test_layouts_mean_the_same(tmp_path, target, layout):
    plain = read(make_head(tmp_path / "plain", target), target)
    other_dir = make_head(tmp_path / "other", target, **layout)
    assert is_eagle3(other_dir)
    other = read(other_dir, target)
    assert other[0] == plain[0]
    assert other[1].keys() == plain[1].keys()
    assert all(np.array_equal(other[1][name], plain[1][name]) for name in plain[1])
    assert np.array_equal(other[2], plain[2])


def test_a_torch_file_means_the_same(tmp_path, target):
    plain_dir, other_dir = (make_head(tmp_path / name, target) for name in ("plain", "other"))
    torch.save(load_file(other_dir / "model.safetensors"), other_dir / "pytorch_model.bin")
    (other_dir / "model.safetensors").unlink()
    plain, other = read(plain_dir, target), read(other_dir, target)
    assert other[0] == plain[0]
    assert all(np.array_equal(other[1][name], plain[1][name]) for name in plain[1])
    assert np.array_equal(other[2], plain[2])


def test_a_speculators_checkpoint_has_its_layer_nested(tmp_path, target):
    head = make_head(tmp_path / "h", target, naming="layers.0")
    plain = read(head, target)[0]
    config = json.loads((head / "config.json").read_text())
    outer = {key: config.pop(key) for key in ("draft_vocab_size", LAYERS_KEY)}
    outer |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    del config["architectures"]
    (head / "config.json").write_text(json.dumps(outer | {"transformer_layer_config": config}))
    assert is_eagle3(head)
    assert read(head, target)[0] == plain


def test_what_a_head_lacks_is_the_targets(tmp_path, target):
    own = read(make_head(tmp_path / "own", target), target)[1]
    whole = {"own_embedding": False, "draft_vocab_size": None, "without": ("lm_head.weight",)}
    shared = read(make_head(tmp_path / "shared", target, **whole), target)[1]
    with CheckpointWeights(target) as weights:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert np.array_equal(shared[name], weights.float32(name, shared[name].shape))
            assert not np.array_equal(own[name], shared[name])


def test_outputs_are_mapped_to_tokens(tmp_path, target):
    ids = read(make_head(tmp_path / "h", target, draft_vocab_size=40), target)[2]
    assert ids.shape == (40,)
    assert len(set(ids.tolist())) == 40
    assert read(make_head(tmp_path / "w", target, draft_vocab_size=None), target)[2] is None


def test_layers_by_both_conventions(tmp_path, target):
    assert read(make_head(tmp_path / "top", target, layers=(1, 2, 4)), target)[0].layers == (1, 2, 4)
    nested = {LAYERS_KEY: None, "eagle_config": {LAYERS_KEY: [0, 1, 3]}}
    head = make_head(tmp_path / "nested", target, **nested)
    with pytest.raises(CheckpointError, match="--eagle3_layers 0,1,3 or --eagle3_layers 1,2,4"):
        read(head, target)
    assert read(head, target, (1, 2, 4))[0].layers == (1, 2, 4)
    unnamed = make_head(tmp_path / "unnamed", target, **{LAYERS_KEY: None})
    with pytest.raises(CheckpointError, match="a target of 4 layers is too small for the usual ones"):
        read(unnamed, target)
    large = make_checkpoint(tmp_path / "large", vocab_size=VOCAB, num_layers=8)
    assert read(unnamed, large)[0].layers == (2, 4, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": (0, 1), LAYERS_KEY: [0, 1, 2]}, r"fc.weight of the EAGLE-3 head has shape .* 3 layers"),
        ({LAYERS_KEY: [0, 5, 6]}, "0,5,6, it must name layers that rise from 0 to 4"),
        ({LAYERS_KEY: [2, 1, 0]}, "it must name layers that rise"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, an EAGLE-3 head has 1"),
        ({"norm_before_fc": True}, "norm_before_fc is set"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"vocab_size": 321}, "vocab_size of the EAGLE-3 head is 321, the target has 320"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128, the target has 64"),
        ({"without": ("lm_head.weight",)}, "lacks d2t or lm_head"),
        ({"without": ("d2t",)}, "lacks d2t or lm_head"),
        ({"without": ("midlayer.hidden_norm.weight",)}, "hidden_norm.weight is missing"),
        ({"spare": {"input_norm.weight": np.ones(64, np.float32)}}, "tensor input_norm.weight of the EAGLE-3 head"),
        ({"spare": {"d2t": np.full(96, 400)}}, "output 0 of the EAGLE-3 head to token 400"),
        ({"spare": {"d2t": -np.arange(96)}}, "two outputs of the EAGLE-3 head to one token"),
        ({"spare": {"d2t": np.zeros(96, np.float32)}}, "d2t is of type BF16, it must be I64 or I32"),
    ],
)
def test_what_is_wrong_gets_a_sentence(tmp_path, target, options, message):
    head = make_head(tmp_path / "h", target, **({"layers": (0, 1, 2)} | options))
    with pytest.raises(CheckpointError, match=message) as caught:
        read(head, target)
    assert "\n" not in str(caught.value)


def test_other_checkpoints_are_no_heads(target):
    assert not is_eagle3(target)
