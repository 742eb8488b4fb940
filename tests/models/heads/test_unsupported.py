"""Drafters that cannot be run are refused by name, and those that can are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.heads.unsupported import UNSUPPORTED, refuse_unsupported
from tests.support.checkpoints import make_checkpoint, write_safetensors
from tests.support.eagle3 import make_head

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
DFLASH = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16}
DFLASH_CONFIG = {"mask_token_id": 9, "target_layer_ids": [1, 9]}

REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...], str]] = [
    ("LiLiCorr", {"architectures": ["LiLiCorrDraftModel"]}, (), (), "architectures is ['LiLiCorrDraftModel']"),
    (
        "LiLiCorr",
        DFLASH | {"dflash_config": {"lilicorr_num_heads": 4}},
        (),
        (),
        "lilicorr_num_heads is 4",
    ),
    ("LiLiCorr", DFLASH, ("lilicorr.in_head.weight",), (), "tensor 'lilicorr.in_head.weight'"),
    ("Domino", {"architectures": ["DominoDraftModel"]}, (), (), "architectures is ['DominoDraftModel']"),
    ("Domino", DFLASH | {"dflash_config": {"projector_type": "domino"}}, (), (), "projector_type is 'domino'"),
    ("Domino", DFLASH, ("prefix_gru.weight_ih_l0",), (), "tensor 'prefix_gru.weight_ih_l0'"),
    ("P-EAGLE", {"architectures": ["PEagleDraftModel"], "draft_vocab_size": 9}, (), (), "['PEagleDraftModel']"),
    ("P-EAGLE", {"speculators_model_type": "peagle"}, (), (), "speculators_model_type is 'peagle'"),
    ("P-EAGLE", {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 7}, (), (), "ptd_token_id is 7"),
    ("P-EAGLE", {"architectures": ["LlamaForCausalLMEagle3"]}, ("model.mask_hidden",), (), "'model.mask_hidden'"),
    ("PARD-2", LLAMA | {"pard_token": 5, "spd_type": "pard2"}, (), (), "spd_type is 'pard2'"),
    ("PARD-2", LLAMA | {"pard_token": 5, "pard2_scale": 0.5}, (), (), "pard2_scale is 0.5"),
    ("PARD-2", LLAMA | {"pard_token": 5}, (), ("config.json", "warp_model.bin"), "warp_model.bin is next to it"),
    ("PARD", LLAMA | {"pard_token": 5}, (), (), "pard_token is 5"),
    ("Laguna DFlash", {"model_type": "laguna", "dflash_config": DFLASH_CONFIG}, (), (), "model_type is 'laguna'"),
    ("Laguna DFlash", DFLASH, ("layers.0.self_attn.g_proj.weight",), (), "self_attn.g_proj.weight"),
    ("MiMo-V2 DFlash", DFLASH, (), ("mask_embedding.pt",), "mask_embedding.pt is next to it"),
    ("MiMo-V2 DFlash", DFLASH | {"attention_sink_bias": True}, (), (), "attention_sink_bias is True"),
    ("MiMo-V2 DFlash", DFLASH, ("layers.0.self_attn.attention_sink_bias",), (), "attention_sink_bias"),
    (
        "DeepSeek-V4 DSpark",
        {"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5},
        (),
        (),
        "dspark_block_size is 5",
    ),
    (
        "EAGLE-1 or EAGLE-2",
        {"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"},
        (),
        (),
        "architectures",
    ),
    ("EAGLE-1 or EAGLE-2", LLAMA, ("fc.weight", "layers.0.mlp.up_proj.weight"), (), "fc.weight and no hidden_norm"),
]


@pytest.mark.parametrize(("kind", "data", "names", "files", "told"), REFUSED)
def test_it_is_named_with_what_told_and_why(
    kind: str, data: dict[str, Any], names: tuple[str, ...], files: tuple[str, ...], told: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        refuse_unsupported(data, "config.json", names, files)
    sentence = str(caught.value)
    assert sentence.startswith("config.json: ")
    assert told in sentence
    assert f"so the draft is {kind}, which is not supported: {UNSUPPORTED[kind]}; use an EAGLE-3 head, " in sentence


def test_every_kind_has_a_case() -> None:
    assert {kind for kind, *_ in REFUSED} == set(UNSUPPORTED)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (LLAMA, ("model.layers.0.mlp.up_proj.weight", "lm_head.weight")),
        ({"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}, ()),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, ("fc.weight", "midlayer.hidden_norm.weight")),
        (LLAMA | {"draft_vocab_size": 32000}, ("fc.weight", "midlayer.hidden_norm.weight")),
        ({"architectures": ["Qwen3Eagle3Model"], "pard_token": None}, ("fc.weight",)),
        (DFLASH | {"dflash_config": DFLASH_CONFIG}, ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj")),
        ({"architectures": ["DFlash2DraftModel"], "dflash_config": DFLASH_CONFIG}, ("candidate_selector.x",)),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256, "mask_token_id": 9}, ("fc.weight",)),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark"}}, ()),
        ({"architectures": ["Qwen3OmniDSparkModel"], "dspark_block_size": 7, "pard_token": 3}, ()),
        ({"architectures": ["MuseGlimmerAssistantModel"]}, ("encoder.fc.weight",)),
        (DFLASH | {"attention_sink_bias": False}, ()),
        ({"medusa_num_heads": 4}, ("0.0.linear.weight",)),
        ({"architectures": None, "dflash_config": None}, ()),
    ],
)
def test_what_can_be_run_is_let_through(data: dict[str, Any], names: tuple[str, ...]) -> None:
    refuse_unsupported(data, "config.json", names)


def test_a_build_refuses_what_would_only_draft_badly(tmp_path: Path) -> None:
    """A P-EAGLE head calls itself EAGLE-3, a PARD model is a decoder with a tokenizer, an EAGLE-1 head has neither."""
    target = make_checkpoint(tmp_path / "target", num_layers=3)
    peagle = make_head(tmp_path / "peagle", target)
    pard = make_checkpoint(tmp_path / "pard")
    for folder, key in ((peagle, "ptd_token_id"), (pard, "pard_token")):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {key: 3}))
    eagle1 = tmp_path / "eagle1"
    eagle1.mkdir()
    (eagle1 / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    write_safetensors(eagle1, {"fc.weight": np.zeros((4, 8), np.float32)}, "bfloat16")
    for folder, kind in ((peagle, "P-EAGLE"), (pard, "PARD"), (eagle1, "EAGLE-1 or EAGLE-2")):
        with pytest.raises(CheckpointError, match=f"so the draft is {kind}, which is not supported"):
            build_engines(BuildOptions(target, folder, tmp_path / "built", max_seq_len=96))
