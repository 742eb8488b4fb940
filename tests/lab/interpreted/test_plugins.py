"""The plugin flavour's meaning: paged caches, plugins computed by plain references, against the native flavour."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from faser_trtllm.builder.network.fp8 import CheckpointLayers
from faser_trtllm.builder.network.segment import build_segment, create_network
from faser_trtllm.errors import ConfigError
from faser_trtllm.models.calibration import calibrate_input_scales
from tests.lab.interpreted.whole_network import BLOCK, MAX_SEQ_LEN, PASSES, TOLERANCE, Whole, trt
from tests.support.networks import make_model, new_builder, options
from tests.support.plugin_stand_in import StandInNetwork, StandInTrt


@pytest.mark.parametrize("case", ["llama-biased", "qwen3"])
def test_both_flavours_mean_the_same(tmp_path: Path, case: str) -> None:
    model = make_model(tmp_path, case)
    native, plugin = Whole(model, False), Whole(model, True)
    assert (native.segment.flavour, plugin.segment.flavour) == ("native", "plugin")
    for mine, theirs in zip(native.run(PASSES), plugin.run(PASSES), strict=True):
        assert np.abs(mine - theirs).max() < TOLERANCE


def test_both_flavours_mean_the_same_in_fp8(tmp_path: Path) -> None:
    """But for rows with an input that their sums put on different sides of a tie, and those that attend to them."""
    config, weights = make_model(tmp_path, "qwen3")
    token_ids = np.random.default_rng(0).integers(0, config.vocab_size, 64).tolist()
    fp8 = CheckpointLayers(weights, calibrate_input_scales(config, weights, token_ids))
    native, plugin = Whole((config, weights), False, fp8), Whole((config, weights), True, fp8)
    found = [np.abs(a - b).max(1) for a, b in zip(native.run(PASSES), plugin.run(PASSES), strict=True)]
    assert (np.concatenate(found) < TOLERANCE).mean() > 0.6
    plain = np.concatenate(Whole((config, weights), True).run(PASSES))
    assert np.abs(plain - np.concatenate(native.run(PASSES))).max(1).min() > 10 * TOLERANCE


def test_a_wrong_block_is_caught(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    native, plugin = Whole(model, False), Whole(model, True)
    plugin.block_table[1] = plugin.block_table[0]
    errors = [np.abs(a - b).max() for a, b in zip(native.run(PASSES), plugin.run(PASSES), strict=True)]
    assert max(errors) > 1000 * TOLERANCE


def test_the_plugin_contract(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    segment = Whole(model, True).segment
    assert segment.plugins == ("faser::append_kv", "faser::verify_attention")
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in (*segment.inputs, *segment.outputs)}
    cache = ("float32", ("blocks", 2, BLOCK, 16))
    assert shapes["block_table"] == ("int32", ("batch", MAX_SEQ_LEN // BLOCK))
    assert shapes["k_cache_3"] == shapes["v_cache_out_3"] == cache
    assert not {"pad_idx", "unpad_idx", "write_idx"} & shapes.keys()
    assert segment.specification != Whole(model, False).segment.specification


def test_what_the_plugins_cannot_do_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path, "mistral-window")
    builder = new_builder(trt)
    network = StandInNetwork(create_network(trt, builder), 4, trt)
    with pytest.raises(ConfigError, match="sliding_window is 7"):
        build_segment(StandInTrt(trt), network, *model, 0, 4, options())
    with pytest.raises(ConfigError, match="has sinks"):
        build_segment(trt, create_network(trt, builder), replace(model[0], has_sinks=True), model[1], 0, 4, options())
    network = StandInNetwork(create_network(trt, builder), 4, trt)
    with pytest.raises(ConfigError, match="are not registered"):
        build_segment(trt, network, *model, 0, 4, options(max_seq_len=7, tokens_per_block=7))
