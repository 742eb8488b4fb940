"""EAGLE-3 checkpoints: published layouts mean the same, what is ambiguous is asked for, and errors are one sentence."""

import dataclasses
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
from tests.support.eagle3 import make_deepspec_head, make_head, make_speculators_head

VOCAB, NUM_LAYERS = 320, 4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, num_layers=NUM_LAYERS)


def read(head, target, layers=(), norm_output=""):
    """Return config, {our name: fp32 tensor}, token ids."""
    with ExitStack() as stack, CheckpointWeights(target) as of_target:
        weights = Eagle3Weights(open_head_files(head, stack), of_target)
        config = load_eagle3_config(head, weights, load_model_config(target), layers, norm_output)
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
    plain = read(make_head(tmp_path / "plain", target), target)[0]
    head = make_speculators_head(tmp_path / "h", target)
    assert is_eagle3(head)
    assert read(head, target)[0] == plain


def test_norms_before_fc(tmp_path, target):
    """A norm of each hidden row, or one of all; the key at the top or under eagle_config, with a prefix or without."""
    plain = read(make_head(tmp_path / "plain", target), target)
    for number, (options, count) in enumerate(
        (
            ({"fc_norm": True}, 3),
            ({"fc_norm": True, "prefix": "model."}, 3),
            ({"norm_before_fc": True}, 1),
            ({"norm_before_fc": True, "eagle_config": {"norm_before_fc": True}}, 1),
        )
    ):
        config, tensors, _ = read(make_head(tmp_path / str(number), target, **options), target)
        assert config == dataclasses.replace(plain[0], num_fc_norms=count)
        norms = [tensors[f"fc_norm.{i}.weight"] for i in range(count)]
        assert [norm.size for norm in norms] == [3 * 64 // count] * count
    nested = make_head(tmp_path / "nested", target, norm_before_fc=True)
    described = json.loads((nested / "config.json").read_text())
    described["eagle_config"] = {"norm_before_fc": described.pop("norm_before_fc")}
    (nested / "config.json").write_text(json.dumps(described))
    assert read(nested, target)[0].num_fc_norms == 1


def test_what_norm_output_means_is_said_by_the_layout_or_asked_for(tmp_path, target):
    head = make_head(tmp_path / "flat", target, norm_output=True)
    with pytest.raises(CheckpointError, match=r"--eagle3_norm_output fed .* or --eagle3_norm_output head"):
        read(head, target)
    assert read(head, target, norm_output="fed")[0].feeds_normed
    assert not read(head, target, norm_output="head")[0].feeds_normed
    assert read(make_speculators_head(tmp_path / "speculators", target, norm_output=True), target)[0].feeds_normed
    for options in ({}, {"norm_output": False}):
        plain = make_head(tmp_path / "plain", target, **options)
        assert not read(plain, target)[0].feeds_normed
        with pytest.raises(
            CheckpointError, match=r"norm_output is not set, and --eagle3_norm_output \(fed\) .* leave the option out"
        ):
            read(plain, target, norm_output="fed")


def test_heads_of_several_layers(tmp_path, target):
    config, tensors, _ = read(make_head(tmp_path / "h", target, num_layers=3), target)
    assert config.model.num_layers == 3
    widths = [tensors[f"model.layers.{i}.self_attn.q_proj.weight"].shape[1] for i in range(3)]
    assert widths == [128, 64, 64]


def test_a_deepspec_checkpoint_names_layers_left(tmp_path, target):
    head = make_deepspec_head(tmp_path / "h", target, layers=(0, 2, 4))
    assert is_eagle3(head)
    config, _, target_ids = read(head, target)
    assert config.layers == (0, 2, 4)
    assert config.model.qk_norm
    assert config.draft_vocab_size == VOCAB
    assert target_ids is None
    other = make_deepspec_head(tmp_path / "o", target, layers=(0, 2, 4), architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(CheckpointError, match=r"target_layer_ids is .* --eagle3_layers -1,1,3 or --eagle3_layers 0,2"):
        read(other, target)


def test_layer_types_say_whether_there_is_a_window(tmp_path, target):
    """A sliding_window alone is what some configurations carry along from their target's."""
    for number, (kind, window) in enumerate((("sliding_attention", 8), ("full_attention", 0))):
        head = make_speculators_head(tmp_path / str(number), target, layer_types=[kind], sliding_window=8)
        assert read(head, target)[0].model.windows == (window,)
    assert read(make_head(tmp_path / "flat", target, sliding_window=8), target)[0].model.windows == (0,)


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
        ({LAYERS_KEY: [0, 5, 6]}, "0,5,6; it must name layers that rise from 0 to 4"),
        ({LAYERS_KEY: [2, 1, 0]}, "it must name layers that rise"),
        ({"num_hidden_layers": 2}, "tensor layers.1.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 2, "architectures": ["Qwen3Eagle3Model"]}, "each layer of a Qwen3Eagle3Model reads"),
        ({"fc_norm": True, "norm_before_fc": True, "without": ("input_norm.weight",)}, "are both set"),
        ({"fc_norm": True, "without": ("fc_norm.1.weight",)}, "tensor fc_norm.1.weight is missing"),
        (
            {"fc_norm": True, "norm_before_fc": None, "spare": {"input_norm.weight": np.ones(64, np.float32)}},
            "are the same one",
        ),
        (
            {"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}},
            "norm_before_fc is True and False; it must",
        ),
        ({"norm_output": "yes"}, "norm_output is 'yes'; it must be true or false"),
        ({"layer_types": ["chunked_attention"]}, "it must name full_attention or sliding_attention for"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window is None, layer_types of sliding_attention ask for"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "for each of the 1 layers"),
        (
            {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 4], LAYERS_KEY: None},
            r"target_layer_ids \+ 1 is 2,5; it must name layers that rise from 0 to 4",
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"vocab_size": 321}, "vocab_size of the EAGLE-3 head is 321, the target has 320"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128, the target has 64"),
        ({"without": ("lm_head.weight",)}, "lacks d2t or lm_head"),
        ({"without": ("d2t",)}, "lacks d2t or lm_head"),
        ({"without": ("midlayer.hidden_norm.weight",)}, "hidden_norm.weight is missing"),
        ({"spare": {"input_norm.weight": np.ones(64, np.float32)}}, "tensor input_norm.weight of the EAGLE-3 head"),
        ({"spare": {"mask_hidden": np.ones((1, 1, 192), np.float32)}}, "tensor mask_hidden of the EAGLE-3 head"),
        ({"spare": {"d2t": np.full(96, 400)}}, "output 0 of the EAGLE-3 head to token 400"),
        ({"spare": {"d2t": -np.arange(96)}}, "two outputs of the EAGLE-3 head to one token"),
        ({"spare": {"d2t": np.zeros(96, np.float32)}}, "d2t is of type BF16; it must be I64 or I32"),
    ],
)
def test_what_is_wrong_gets_a_sentence(tmp_path, target, options, message):
    head = make_head(tmp_path / "h", target, **({"layers": (0, 1, 2)} | options))
    with pytest.raises(CheckpointError, match=message) as caught:
        read(head, target)
    assert "\n" not in str(caught.value)


def test_other_checkpoints_are_no_heads(target):
    assert not is_eagle3(target)
