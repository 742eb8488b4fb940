"""MTP layers in their target's checkpoint: what is read, and errors of one sentence."""

from contextlib import ExitStack

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.checkpoint.open import open_checkpoint
from faser_trtllm.models.heads.mtp import MtpWeights, load_mtp_config
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_writer import TYPE_F16, write_gguf
from tests.support.mtp import make_mimo


def load(path, reads_normed=False):
    with ExitStack() as stack:
        checkpoint = open_checkpoint(path, stack)
        weights = MtpWeights(checkpoint.weights, checkpoint.config.tie_word_embeddings)
        config = load_mtp_config(
            path, weights, checkpoint.config, 2 * checkpoint.config.num_layers, reads_normed=reads_normed
        )
        shapes = {"model.norm.weight": (64,), "lm_head.weight": (320, 64), "model.embed_tokens.weight": (320, 64)}
        shapes |= {"model.layers.0.input_layernorm.weight": (64,), "token_layernorm.weight": (64,)}
        found = {name: weights.float32(name, shape) for name, shape in shapes.items()}
        theirs = {
            "model.norm.weight": "model.mtp_layers.0.final_layernorm.weight",
            "model.layers.0.input_layernorm.weight": "model.mtp_layers.0.input_layernorm.weight",
            "token_layernorm.weight": "model.mtp_layers.0.token_layernorm.weight",
        }
        for ours, name in theirs.items():
            assert np.array_equal(found[ours], checkpoint.weights.float32(name, found[ours].shape))
        return config, found


@pytest.mark.parametrize("reads_normed", [False, True])
def test_it_is_a_layer_of_its_target(tmp_path, reads_normed):
    config, found = load(make_mimo(tmp_path, num_layers=3), reads_normed)
    assert (config.layer, config.reads_normed) == (6, reads_normed)
    assert (config.model.num_layers, config.model.qkv_bias, config.model.o_bias) == (1, True, False)
    assert not np.array_equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_a_tied_target_gives_its_embedding_as_the_lm_head(tmp_path):
    config, found = load(make_mimo(tmp_path, tie=True))
    assert not config.model.tie_word_embeddings
    assert np.array_equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nextn_predict_layers": None}, "num_nextn_predict_layers is None, so .* has no MTP layer; leave mtp out"),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0, so"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2, only one MTP layer, applied again, is supp"),
        (
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
            "sliding_window is 16, an MTP layer with a window is not supported",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, options, message):
    with pytest.raises(CheckpointError, match=message):
        load(make_mimo(tmp_path, **options))


def test_another_layout_is_refused_by_its_first_tensor(tmp_path):
    path = make_checkpoint(tmp_path, "qwen2")
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace("{", '{"num_nextn_predict_layers": 1,', 1))
    with pytest.raises(CheckpointError, match=r"tensor model\.mtp_layers\.0\.\S+ is missing"):
        load(path)


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    path = make_mimo(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    name = "model.mtp_layers.0.input_proj.weight"
    save_file(tensors | {name: tensors[name][:, :64].contiguous()}, path)
    with pytest.raises(
        CheckpointError, match=r"mtp_layers.0.input_proj.weight has shape \[64, 64\], the configuration asks"
    ):
        load(tmp_path)


def test_a_gguf_file_has_none(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "t"), TYPE_F16)
    with pytest.raises(CheckpointError, match=r"mtp is set, but \S+ is a GGUF file"):
        load(path)
