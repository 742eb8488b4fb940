"""Medusa checkpoints: published layouts mean the same, and errors are one sentence."""

import zipfile
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.heads.medusa import MedusaWeights, expected_shapes, is_medusa, load_medusa_config
from faser_trtllm.models.heads.torch_file import open_head_files
from tests.support.checkpoints import make_checkpoint
from tests.support.medusa import make_medusa

VOCAB, HIDDEN = 320, 64


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=3)


def read(directory, target):
    """Return config, its tensors by name."""
    with ExitStack() as stack:
        weights = MedusaWeights(open_head_files(directory, stack))
        config = load_medusa_config(directory, weights, load_model_config(target))
        return config, {name: weights.float32(name, shape) for name, shape in expected_shapes(config).items()}


@pytest.mark.parametrize(
    "layout",
    [
        {"layout": "prefixed"},
        {"layout": "vllm", "medusa_num_heads": None, "medusa_num_layers": None, "model_type": "medusa"},
        {"torch_file": "medusa_lm_head.pt"},
        {"torch_file": "pytorch_model.bin"},
    ],
)
@pytest.mark.parametrize("biases", [True, False])
def test_layouts_mean_the_same(tmp_path, target, layout, biases):
    plain = read(make_medusa(tmp_path / "plain", target, num_layers=2, biases=biases), target)
    other_dir = make_medusa(tmp_path / "other", target, num_layers=2, biases=biases, **layout)
    assert is_medusa(other_dir)
    other = read(other_dir, target)
    assert other[0] == plain[0]
    assert other[1].keys() == plain[1].keys()
    assert all(np.array_equal(other[1][name], plain[1][name]) for name in plain[1])
    assert any(values.any() for name, values in plain[1].items() if "residual_bias" in name) == biases


def test_a_config_may_ask_for_fewer_heads(tmp_path, target):
    assert read(make_medusa(tmp_path / "h", target, num_heads=3, medusa_num_heads=2), target)[0].num_heads == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"medusa_num_heads": 4}, "medusa_num_heads is 4, the checkpoint has 3 heads"),
        ({"medusa_num_heads": "3"}, "medusa_num_heads is '3'"),
        ({"medusa_num_layers": 2}, "medusa_num_layers is 2, the checkpoint has 1 residual blocks"),
        ({"num_layers": 2, "medusa_num_layers": 1}, "have 2 residual blocks each, not 1"),
        ({"vocab_size": 321}, "vocab_size of the Medusa heads is 321, the target has 320"),
        ({"hidden_size": 128}, "hidden_size of the Medusa heads is 128, the target has 64"),
        ({"truncated_vocab_size": 100}, "truncated_vocab_size is 100"),
        ({"without": ("1.0.linear.weight",)}, "residual block 0 of Medusa head 1 is missing"),
        ({"without": ("1.1.weight",), "medusa_num_heads": 2}, "the LM head of Medusa head 1 is missing"),
        ({"spare": {"norm.weight": np.ones(64, np.float32)}}, "tensor norm.weight is not one that Medusa heads have"),
        ({"spare": {"lm_heads.0.weight": np.ones((320, 64), np.float32)}}, "are the same one"),
        ({"spare": {"0.2.weight": np.ones((320, 64), np.float32)}}, "are the same one"),
        ({"spare": {"3.2.weight": np.ones((320, 64), np.float32)}}, "must follow its 1 residual blocks"),
        ({"spare": {"0.0.linear.weight": np.ones((64, 32), np.float32)}}, r"has shape \[64, 32\]"),
        ({"spare": {"0.0.linear.weight": np.ones((64, 32), np.float32)}, "torch_file": "a"}, "has neither"),
    ],
)
def test_what_is_wrong_gets_a_sentence(tmp_path, target, options, message):
    directory = make_medusa(tmp_path / "h", target, **options)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(directory, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"0.0.linear.weight": torch.ones(64, 32)}, r"has shape \[64, 32\]"),
        ({"0.0.linear.weight": torch.ones(64, 64, dtype=torch.int8)}, "is of type int8"),
        ({"0.0.linear.weight": [1, 2]}, "holds other things than tensors"),
        (torch.nn.Identity(), r"holds a 'torch.nn.modules.linear.Identity', allowed are tensors"),
        ({"x" * 257: torch.ones(1)}, "a name of 257 characters"),
        ({"0.0.linear.w\u00e9ight": torch.ones(1)}, "printable ones of ASCII"),
        ({"0.0.linear.weight": torch.ones(1, 1).expand(64, 64)}, "has values that are not stored"),
        ({f"{i}": torch.ones(1) for i in range(2000)}, "bytes, allowed are 131072; save it as safetensors"),
        (dict.fromkeys("ab", torch.ones(1)), "one tensor under several names"),
    ],
)
def test_a_torch_file_holds_tensors_and_nothing_else(tmp_path, target, content, message):
    directory = make_medusa(tmp_path / "h", target, torch_file="medusa_lm_head.pt")
    if isinstance(content, dict):
        content = torch.load(directory / "medusa_lm_head.pt", weights_only=True) | content
    torch.save(content, directory / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match=message) as caught:
        read(directory, target)
    assert "\n" not in str(caught.value)


def _nested(depth):
    """A pickle whose tuples hold each other twice, called as a function: torch names all 2**depth of them."""
    data = b"\x80\x02NN\x86q\x00"
    for level in range(1, depth):
        data += b"0h" + bytes([level - 1]) + b"h" + bytes([level - 1]) + b"\x86q" + bytes([level])
    return data + b")R."


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x80\x02X" + (100_000).to_bytes(4, "little") + b"x" * 100_000 + b")R.",
        b"\x80\x02c" + b"y" * 100_000 + b"\nz\n.",
        _nested(60),
    ],
    ids=["long name", "long class", "nested"],
)
def test_a_hostile_pickle_is_refused_before_torch_reads_it(tmp_path, target, hostile):
    """torch would make a message of it for minutes."""
    directory = make_medusa(tmp_path / "h", target, torch_file="pytorch_model.bin")
    file = directory / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in contents if name.endswith("data.pkl"))
    with zipfile.ZipFile(file, "w") as archive:
        for other, content in (contents | {name: hostile}).items():
            archive.writestr(other, content)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin") as caught:
        read(directory, target)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_files_of_old_torch_are_refused_with_what_to_do(tmp_path, target):
    directory = make_medusa(tmp_path / "h", target, torch_file="pytorch_model.bin")
    file = directory / "pytorch_model.bin"
    torch.save(torch.load(file, weights_only=True), file, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"is no zip archive, .* save it again with a newer torch or as safetens"):
        read(directory, target)


def test_other_checkpoints_are_no_heads(target):
    assert not is_medusa(target)
