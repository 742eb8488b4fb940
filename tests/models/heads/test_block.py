"""Block drafters' checkpoints: published layouts mean the same, what is ambiguous is asked for, and errors are one
sentence."""

import json
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.heads.block import BlockWeights, expected_shapes, is_block, load_block_config
from faser_trtllm.models.heads.torch_file import open_head_files
from faser_trtllm.models.weights import CheckpointWeights
from tests.support.block_drafter import LAYOUTS, make_block_drafter
from tests.support.block_drafter_reference import TorchBlockDrafter
from tests.support.checkpoints import make_checkpoint
from tests.support.eagle3 import make_head

VOCAB, NUM_LAYERS, SLOTS = 320, 4, {"specforge_dspark": "anchor"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, num_layers=NUM_LAYERS)


def read(drafter, target, layers=(), slots=""):
    """Return config, {our name: fp32 tensor}."""
    with ExitStack() as stack, CheckpointWeights(target) as of_target:
        config = load_model_config(target)
        weights = BlockWeights(open_head_files(drafter, stack), of_target, config.tie_word_embeddings)
        found = load_block_config(drafter, weights, config, layers, slots)
        return found, {name: weights.float32(name, shape) for name, shape in expected_shapes(found).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_says_what_the_published_code_reads_in_it(tmp_path, target, layout):
    drafter = make_block_drafter(
        tmp_path / "d", target, layout, layers=(0, 2, 4), num_layers=3, block_size=5, windows=(8, 0, 8)
    )
    assert is_block(drafter)
    config = read(drafter, target, slots=SLOTS.get(layout, ""))[0]
    anchors = layout in ("dspark", "dspark_plain", "specforge_dspark", "speculators_dspark")
    reference = TorchBlockDrafter(drafter, target, first_slot=0 if anchors else 1)
    assert config.layers == (0, 2, 4) == reference.layers
    assert config.num_features == 3 * 64
    assert (config.block_size, config.first_slot) == (5, 0 if anchors else 1)
    assert config.num_places == (5 if anchors else 4)
    assert config.mask_token_id == VOCAB - 2
    assert config.windows == (8, 0, 8)
    assert config.causal == ((False,) * 3 if layout == "dflash2" else (True, False, True))
    assert config.markov_rank == (32 if layout.endswith("dspark") else 0)
    if layout == "dflash2":
        assert (config.selector_rank, config.selector_top_k) == (32, 8)
        assert (config.conv_taps, config.conv_group_size) == (2, 16)
        assert (config.logit_softcap, config.logit_scale, config.embedding_scale) == (5.0, 0.75, 1.0)
    else:
        assert (config.selector_rank, config.conv_taps, config.logit_softcap, config.logit_scale) == (0, 0, 0.0, 1.0)
    assert config.model.num_layers == 3
    assert config.model.qk_norm
    assert config.model.rope.theta == 10000.0


def test_layouts_of_one_drafter_mean_the_same(tmp_path, target):
    configs, tensors = zip(
        *(
            read(make_block_drafter(tmp_path / layout, target, layout, own_embedding=False), target)
            for layout in ("dflash", "dflash_nested", "speculators_dflash")
        ),
        strict=True,
    )
    assert len(set(configs)) == 1
    for other in tensors[1:]:
        assert other.keys() == tensors[0].keys()
        assert all(np.array_equal(other[name], tensors[0][name]) for name in other)


@pytest.mark.parametrize("tie", [False, True])
def test_what_a_drafter_lacks_is_the_targets(tmp_path, tie):
    target = make_checkpoint(tmp_path / "target", num_layers=NUM_LAYERS, tie=tie)
    shared, tensors = read(make_block_drafter(tmp_path / "shared", target), target)
    assert shared.model.tie_word_embeddings == tie
    assert ("lm_head.weight" in tensors) != tie
    with CheckpointWeights(target) as weights:
        for name in tensors.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
            assert np.array_equal(tensors[name], weights.float32(name, tensors[name].shape))
    own, of_its_own = read(make_block_drafter(tmp_path / "own", target, "dspark"), target)
    assert not own.model.tie_word_embeddings
    for name in tensors.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        assert not np.array_equal(tensors[name], of_its_own[name])


def test_a_drafter_may_have_only_an_embedding_of_its_own(tmp_path):
    target = make_checkpoint(tmp_path / "target", num_layers=NUM_LAYERS, tie=True)
    drafter = make_block_drafter(tmp_path / "d", target, "dspark_plain", without=("lm_head.weight",))
    config, tensors = read(drafter, target)
    assert not config.model.tie_word_embeddings
    with CheckpointWeights(target) as weights:
        of_target = weights.float32("model.embed_tokens.weight", (VOCAB, 64))
    assert np.array_equal(tensors["lm_head.weight"], of_target)
    assert not np.array_equal(tensors["model.embed_tokens.weight"], of_target)


def test_early_files_of_specforge_nest_their_heads(tmp_path, target):
    plain = make_block_drafter(tmp_path / "plain", target, "specforge_dspark")
    names = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    found = read(plain, target, slots="anchor")
    spare = {f"logit_head.{name}": found[1][name] for name in names}
    early = make_block_drafter(tmp_path / "early", target, "specforge_dspark", spare=spare, without=names)
    other = read(early, target, slots="anchor")
    assert other[0] == found[0]
    assert all(np.array_equal(other[1][name], found[1][name]) for name in names)


@pytest.mark.parametrize("layout", ["specforge_dspark", "speculators_dspark"])
def test_slots_are_asked_for_where_files_differ(tmp_path, target, layout):
    drafter = make_block_drafter(tmp_path / "d", target, layout, block={"sample_from_anchor": None})
    with pytest.raises(CheckpointError, match=r"sample_from_anchor .* --block_slots anchor .* --block_slots mask"):
        read(drafter, target)
    assert read(drafter, target, slots="anchor")[0].first_slot == 0
    assert read(drafter, target, slots="mask")[0].first_slot == 1


@pytest.mark.parametrize("layout", ["dflash", "dflash2", "specforge_dspark", "dspark", "speculators_dflash"])
@pytest.mark.parametrize("key", ["sample_from_anchor", "query_zero_predicts_next"])
def test_a_key_decides_over_the_layout_and_the_flag_over_both(tmp_path, target, layout, key):
    for value in (True, False):
        block = {"sample_from_anchor": None} | {key: value}
        drafter = make_block_drafter(tmp_path / str(value), target, layout, block=block)
        assert read(drafter, target)[0].first_slot == (0 if value else 1)
        assert read(drafter, target, slots="mask")[0].first_slot == 1


def test_speculators_files_from_before_the_key_begin_at_the_second_slot(tmp_path, target):
    drafter = make_block_drafter(tmp_path / "d", target, "speculators_dflash", block={"sample_from_anchor": None})
    assert read(drafter, target)[0].first_slot == 1


def test_speculators_type_counts_and_not_the_class_that_trained(tmp_path, target):
    drafter = make_block_drafter(tmp_path / "d", target, "speculators_dspark")
    config = json.loads((drafter / "config.json").read_text())
    found = read(drafter, target)[0]
    (drafter / "config.json").write_text(json.dumps(config | {"architectures": ["DSparkDraftModel"]}))
    assert read(drafter, target)[0] == found


def test_layers_that_the_user_names_are_entered(tmp_path, target):
    drafter = make_block_drafter(tmp_path / "d", target, layers=(1, 2))
    assert read(drafter, target)[0].layers == (1, 2)
    assert read(drafter, target, (2, 3))[0].layers == (2, 3)
    unnamed = make_block_drafter(tmp_path / "u", target, layers=(1, 2), block={"target_layer_ids": None})
    with pytest.raises(CheckpointError, match=r"target_layer_ids is missing, .* with --eagle3_layers"):
        read(unnamed, target)
    assert read(unnamed, target, (1, 4))[0].layers == (1, 4)


@pytest.mark.parametrize(
    ("layout", "options", "causal"),
    [
        ("dflash", {}, (True, False)),
        ("dflash", {"is_causal": False}, (False, False)),
        ("dflash", {"is_causal": True}, (True, True)),
        ("dflash", {"block": {"causal": False}}, (False, False)),
        ("dflash", {"block": {"causal": True}, "is_causal": False}, (False, False)),
        ("speculators_dflash", {"block": {"sliding_window_non_causal": True}}, (False, False)),
    ],
)
def test_sliding_layers_are_causal_unless_a_key_says_otherwise(tmp_path, target, layout, options, causal):
    config = read(make_block_drafter(tmp_path / "d", target, layout, windows=(16, 0), **options), target)[0]
    assert config.causal == causal
    assert config.windows == (16, 0)


def test_missing_layer_types_are_filled_in_as_transformers_does(tmp_path, target):
    window = {"sliding_window": 16, "use_sliding_window": True, "layer_types": None}
    for first, windows in ((1, (0, 16)), (2, (0, 0))):
        drafter = make_block_drafter(tmp_path / str(first), target, max_window_layers=first, **window)
        assert read(drafter, target)[0].windows == windows


def test_attention_may_have_biases(tmp_path, target):
    config, tensors = read(make_block_drafter(tmp_path / "d", target, attention_bias=True), target)
    assert config.model.qkv_bias
    assert config.model.o_bias
    assert tensors["model.layers.1.self_attn.o_proj.bias"].shape == (64,)


def test_scales_of_dflash2_may_be_missing(tmp_path, target):
    keys = {"final_logit_softcapping": None, "output_multiplier": None, "input_embedding_scale": 2.0}
    config = read(make_block_drafter(tmp_path / "d", target, "dflash2", block=keys), target)[0]
    assert (config.logit_softcap, config.logit_scale, config.embedding_scale) == (0.0, 1.0, 2.0)


ONE = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("dflash", {"vocab_size": 300}, "vocab_size of the block drafter is 300, the target's is 320"),
        ("speculators_dflash", {"block": {"draft_vocab_size": 96}}, "draft_vocab_size of the block drafter is 96"),
        ("dflash", {"num_target_layers": 36}, "num_target_layers of the block drafter is 36, the target's is 4"),
        ("dspark", {"target_hidden_size": 128}, "target_hidden_size of the block drafter is 128"),
        ("dflash", {"block": {"mask_token_id": 320}}, "mask_token_id is 320, beyond the embedding of the target's 320"),
        ("dflash", {"block": {"mask_token_id": None}}, "mask_token_id is missing"),
        ("dflash", {"block": {"target_layer_ids": [1, 4]}}, r"target_layer_ids is \[1, 4\]; .* rise from -1 to 3"),
        ("dflash", {"block": {"target_layer_ids": [1, 0]}}, "must name layers of the target that rise"),
        ("dflash", {"block": {"target_layer_ids": [0, True]}}, "must name layers of the target that rise"),
        ("speculators_dflash", {"block": {"aux_hidden_state_layer_ids": [1, 5]}}, "ids is .* rise from 0 to 4"),
        ("dflash", {"block": {"target_layer_ids": [0, 1, 2]}}, "fc.weight of the block drafter .* 3 layers"),
        ("dflash", {"block_size": 1}, "block_size is 1; it must be an integer of at least 2"),
        ("dspark", {"block_size": 65}, "block_size is 65; it must be at most 64"),
        ("dflash", {"rope_theta": None}, "rope_theta is missing"),
        ("dflash", {"is_neox_style": False}, "is_neox_style is False, only true is supported"),
        ("dflash", {"layer_types": ["full_attention"]}, "it must name full_attention or sliding_attention for each of"),
        ("dflash", {"windows": (8, 8), "use_sliding_window": False}, "use_sliding_window is false"),
        ("dflash", {"windows": (3, 3)}, "sliding_window is 3; it must be an integer of at least 4"),
        ("dflash2", {"block": {"conv_group_size": 24}}, "hidden_size 64 is not a multiple of conv_group_size 24"),
        ("dflash2", {"block": {"selector_rank": None}}, "selector_rank is missing"),
        ("dflash2", {"block": {"final_logit_softcapping": -1}}, "final_logit_softcapping is -1; it must be a number"),
        ("dflash2", {"block": {"lattice": 3}}, "dflash_config.lattice of a DFlash2DraftModel is not known"),
        ("dflash", {"block": {"selector_top_k": 3}}, "dflash_config.selector_top_k of a DFlashDraftModel is not known"),
        ("dflash", {"block": {"projector_type": "domino"}}, "projector_type is 'domino', which is not supported"),
        ("dspark", {"block": {"markov_head_type": "gated"}}, "markov_head_type is 'gated', only 'vanilla'"),
        ("dspark", {"block": {"markov_head_type": "rnn"}}, "markov_head_type is 'rnn', only 'vanilla'"),
        ("dflash", {"without": ("fc.weight",)}, "tensor fc.weight is missing"),
        ("dflash", {"without": ("layers.1.self_attn.q_norm.weight",)}, "layers.1.self_attn.q_norm.weight is missing"),
        (
            "dspark",
            {"spare": {"markov_head.markov_w2.weight": ONE}},
            r"markov_head.markov_w2.weight has shape \[4, 4\]",
        ),
        (
            "dspark_plain",
            {"spare": {"markov_head.markov_w1.weight": ONE}},
            "is not part of the model that its config.json describes",
        ),
        (
            "dflash",
            {"spare": {"layers.0.self_attn.qkv_proj.weight": ONE}},
            "qkv_proj.weight .* is not part of the model",
        ),
        ("speculators_dflash", {"spare": {"d2t": np.zeros(8, np.int64)}}, "d2t .* is not part of the model"),
        (
            "dflash",
            {"spare": {"layers.2.mlp.up_proj.weight": ONE}},
            "layers.2.mlp.up_proj.weight .* is not part of the model",
        ),
        ("dspark", {"spare": {"logit_head.markov_head.markov_w1.weight": ONE}}, "are the same one"),
    ],
)
def test_what_is_wrong_gets_a_sentence(tmp_path, target, layout, options, message):
    drafter = make_block_drafter(tmp_path / "d", target, layout, **options)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(drafter, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Gemma4DSparkModel", "DFlash3DraftModel"])
def test_unsupported_architectures_are_recognized_and_refused(tmp_path, target, name):
    drafter = make_block_drafter(tmp_path / "d", target)
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    assert is_block(drafter)
    with pytest.raises(CheckpointError, match=f"architecture {name} of a block drafter is not supported"):
        read(drafter, target)


def test_two_block_sizes_are_refused(tmp_path, target):
    drafter = make_block_drafter(tmp_path / "d", target, "dflash_nested")
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"block_size": 7}))
    with pytest.raises(CheckpointError, match="block_size is 7 at the top and 4 in dflash_config"):
        read(drafter, target)


def test_a_drafter_of_another_width_needs_an_embedding_and_a_head(tmp_path, target):
    narrow = make_checkpoint(tmp_path / "narrow", vocab_size=VOCAB, num_layers=NUM_LAYERS, hidden_size=32)
    drafter = make_block_drafter(tmp_path / "d", narrow)
    with pytest.raises(CheckpointError, match=r"hidden_size 32 is not the target's \(64\)"):
        read(drafter, target)
    whole = make_block_drafter(tmp_path / "whole", target, "dspark", hidden_size=32)
    config, tensors = read(whole, target)
    assert (config.model.hidden_size, config.target_hidden_size, config.num_features) == (32, 64, 128)
    assert tensors["lm_head.weight"].shape == (VOCAB, 32)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        half = make_block_drafter(tmp_path / name, target, "dspark", hidden_size=32, without=(name,))
        with pytest.raises(CheckpointError, match="lacks embed_tokens or lm_head"):
            read(half, target)


def test_other_checkpoints_are_no_block_drafters(tmp_path, target):
    assert not is_block(target)
    assert not is_block(make_head(tmp_path / "h", target))


def test_the_published_header_of_dflash2_passes(tmp_path):
    """Names and shapes of z-lab's DFlash2 for Muse-Glimmer-30B, 81 tensors, without their values."""
    hidden, inner, vocab, rank = 6656, 19968, 202048, 256
    shapes = {"fc.weight": (hidden, 5 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    shapes |= {f"candidate_selector.{side}_codebook": (vocab, rank) for side in ("predecessor", "successor")}
    shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    for i in range(5):
        of_layer = {
            "attention_conv.base_kernel": (2, 2, hidden),
            "attention_conv.kernel_projection.weight": (1664, hidden),
            "input_layernorm.weight": (hidden,),
            "mlp.down_proj.weight": (hidden, inner),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp_conv.base_kernel": (2, 2, hidden),
            "mlp_conv.kernel_projection.weight": (1664, hidden),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.k_norm.weight": (128,),
            "self_attn.k_proj.weight": (1024, hidden),
            "self_attn.o_proj.weight": (hidden, 4096),
            "self_attn.q_norm.weight": (128,),
            "self_attn.q_proj.weight": (4096, hidden),
            "self_attn.v_proj.weight": (1024, hidden),
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in of_layer.items()}
    assert len(shapes) == 81
    config = {
        "architectures": ["DFlash2DraftModel"],
        "attention_bias": False,
        "dflash_config": {
            "block_size": 16,
            "conv_group_size": 16,
            "conv_kernel_size": 2,
            "final_logit_softcapping": 20.0,
            "mask_token_id": 201818,
            "output_multiplier": 0.19611613513818404,
            "selector_rank": rank,
            "selector_top_k": 16,
            "target_layer_ids": [1, 13, 25, 37, 49],
        },
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 5,
        "max_position_embeddings": 131072,
        "max_window_layers": 5,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 52,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "sliding_window": 2048,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "vocab_size": vocab,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    of_target = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    small = make_checkpoint(tmp_path / "target")
    target = replace(load_model_config(small), vocab_size=vocab, hidden_size=hidden, num_layers=52)
    found = load_block_config(tmp_path, BlockWeights(Header(shapes), Header(of_target), False), target)
    assert found.layers == (2, 14, 26, 38, 50)
    assert (found.num_places, found.mask_token_id) == (15, 201818)
    assert found.windows == (2048,) * 5
    assert found.causal == (False,) * 5
    for name in shapes:
        fewer = {key: shape for key, shape in shapes.items() if key != name}
        with pytest.raises(CheckpointError):
            load_block_config(tmp_path, BlockWeights(Header(fewer), Header(of_target), False), target)


class Header:
    """Names and shapes of a checkpoint."""

    def __init__(self, shapes):
        self._shapes = shapes

    def __iter__(self):
        return iter(self._shapes)

    def shape(self, name):
        if name not in self._shapes:
            raise CheckpointError(f"tensor {name} is missing")
        return self._shapes[name]
